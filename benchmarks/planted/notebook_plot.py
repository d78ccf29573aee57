#!/usr/bin/env python
# coding: utf-8

# # Autoencoder for digits
# Exported from a notebook.

# In[1]:


import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

# In[2]:


X = torch.from_numpy(load_digits().data).float() / 16
X.shape

# In[3]:


torch.manual_seed(1)
encoder = nn.Sequential(
    nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8)
)
decoder = nn.Sequential(
    nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 64)
)
model = nn.Sequential(encoder, decoder)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
loss_fn = nn.MSELoss()
history = []

# In[4]:


def show_progress(history):
    fig, ax = plt.subplots(figsize=(8, 4))
    ax.plot(history)
    ax.set_yscale("log")
    ax.set_xlabel("step")
    ax.set_ylabel("loss")
    fig.savefig("progress.png")
    plt.close(fig)


# In[5]:


for step in range(600):
    batch = X[torch.randint(len(X), (256,))]
    opt.zero_grad()
    loss = loss_fn(model(batch), batch)
    loss.backward()
    opt.step()
    history.append(loss.item())
    if step % 10 == 0:
        show_progress(history)

# In[6]:


with torch.no_grad():
    print("reconstruction error", loss_fn(model(X), X).item())
