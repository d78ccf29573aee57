"""Trains a residual MLP on scikit-learn's breast cancer data. Configured by YAML.

python yaml_anomaly.py --config config.yaml --set epochs=10
"""

import argparse
import logging

import torch
import yaml
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

DEFAULTS = """
seed: 42
epochs: 60
batch_size: 64
model: {width: 128, blocks: 8, dropout: 0.1}
optimizer: {lr: 0.001, weight_decay: 0.01}
detect_anomaly: false
"""
log = logging.getLogger("train")


class Block(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class ResMLP(nn.Module):
    def __init__(self, features, width, blocks, dropout):
        super().__init__()
        self.stem = nn.Linear(features, width)
        self.blocks = nn.Sequential(*[Block(width, dropout) for _ in range(blocks)])
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)))


def read_config():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    parser.add_argument("--set", nargs="*", default=[])
    args = parser.parse_args()
    config = yaml.safe_load(DEFAULTS)
    if args.config:
        with open(args.config) as file:
            config.update(yaml.safe_load(file))
    for pair in args.set:
        key, value = pair.split("=")
        config[key] = yaml.safe_load(value)
    return config


def main():
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    config = read_config()
    torch.manual_seed(config["seed"])
    torch.autograd.set_detect_anomaly(config["detect_anomaly"])
    x, y = load_breast_cancer(return_X_y=True)
    x = StandardScaler().fit_transform(x).astype("float32")
    x, x_test, y, y_test = train_test_split(x, y, random_state=config["seed"])
    train = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    loader = DataLoader(train, config["batch_size"], shuffle=True)
    model = ResMLP(x.shape[1], **config["model"])
    optimizer = torch.optim.AdamW(model.parameters(), **config["optimizer"])
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for epoch in range(config["epochs"]):
        model.train()
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), labels)
            loss.backward()
            optimizer.step()
        if epoch % 20 == 0:
            log.info("epoch %d loss %.4f", epoch, loss.item())
    model.eval()
    with torch.no_grad():
        right = (model(torch.from_numpy(x_test)).argmax(1).numpy() == y_test).mean()
    log.info("accuracy %.3f", right)


if __name__ == "__main__":
    main()
