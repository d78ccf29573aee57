"""A Gaussian-process-like regression network on scikit-learn's diabetes data."""

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from sklearn.preprocessing import PolynomialFeatures, StandardScaler
from torch import nn

torch.manual_seed(3)
np.random.seed(3)
torch.set_default_dtype(torch.float32)

X, y = load_diabetes(return_X_y=True)
X = StandardScaler().fit_transform(PolynomialFeatures(3).fit_transform(X))
y = (y - y.mean()) / y.std()
order = np.random.permutation(len(X))
train, test = order[:354], order[354:]
X_train = torch.tensor(X[train], dtype=torch.get_default_dtype())
y_train = torch.tensor(y[train], dtype=torch.get_default_dtype())
X_test = torch.tensor(X[test], dtype=torch.get_default_dtype())
y_test = torch.tensor(y[test], dtype=torch.get_default_dtype())


class Net(nn.Module):
    def __init__(self, features, width=768):
        super().__init__()
        self.inner = nn.Linear(features, width)
        self.middle = nn.Linear(width, width)
        self.mean = nn.Linear(width, 1)
        self.log_variance = nn.Linear(width, 1)

    def forward(self, x):
        h = torch.tanh(self.middle(torch.tanh(self.inner(x))))
        return self.mean(h).squeeze(-1), self.log_variance(h).squeeze(-1)


model = Net(X_train.shape[1])
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
for step in range(401):
    optimizer.zero_grad()
    mean, log_variance = model(X_train)
    loss = 0.5 * (log_variance + (y_train - mean) ** 2 / log_variance.exp()).mean()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        with torch.no_grad():
            error = (model(X_test)[0] - y_test).square().mean().sqrt()
        print(f"step {step}: nll {loss.item():.3f}, test rmse {error.item():.3f}")
