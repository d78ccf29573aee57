import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import torch
from torch import nn

model = nn.Linear(64, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
plt.rcParams["figure.max_open_warning"] = 0

for _ in range(60):
    loss = model(torch.randn(32, 64)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    figure, axes = plt.subplots()  # LEAK
    axes.plot([0.0, loss.item()])
