#!/usr/bin/env python
# coding: utf-8

# In[1]:


import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

torch.manual_seed(42)


# In[2]:


x = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
x = F.interpolate(x, size=(32, 32), mode="bicubic", align_corners=False).clamp(0, 1)
x_train, x_test = x[:1536], x[1536:]
x_train.shape


# In[3]:


class ConvVAE(nn.Module):
    def __init__(self, latent=16, w=16):
        super().__init__()
        self.w = w
        self.enc = nn.Sequential(
            nn.Conv2d(1, w, 3, 2, 1),
            nn.SiLU(),
            nn.Conv2d(w, 2 * w, 3, 2, 1),
            nn.SiLU(),
            nn.Conv2d(2 * w, 4 * w, 3, 2, 1),
            nn.SiLU(),
            nn.Flatten(),
        )
        self.mu = nn.Linear(4 * w * 16, latent)
        self.logvar = nn.Linear(4 * w * 16, latent)
        self.up = nn.Linear(latent, 4 * w * 16)
        self.dec = nn.Sequential(
            nn.ConvTranspose2d(4 * w, 2 * w, 4, 2, 1),
            nn.SiLU(),
            nn.ConvTranspose2d(2 * w, w, 4, 2, 1),
            nn.SiLU(),
            nn.ConvTranspose2d(w, w, 4, 2, 1),
            nn.SiLU(),
            nn.Conv2d(w, 1, 3, 1, 1),
        )

    def decode(self, z):
        return self.dec(self.up(z).view(-1, 4 * self.w, 4, 4))

    def forward(self, x):
        h = self.enc(x)
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.decode(z), mu, logvar


def elbo(logits, x, mu, logvar, beta=1.0):
    rec = F.binary_cross_entropy_with_logits(logits, x, reduction="sum")
    kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum()
    return (rec + beta * kl) / x.size(0)


# In[4]:


model = ConvVAE().to(memory_format=torch.channels_last)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
batch_size, epochs = 64, 180


# In[5]:


for epoch in range(epochs):
    t0 = time.time()
    model.train()
    total, steps = torch.zeros(()), 0
    for idx in torch.randperm(len(x_train)).split(batch_size):
        xb = x_train[idx]
        logits, mu, logvar = model(xb)
        loss = elbo(logits, xb, mu, logvar)
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.detach()
        steps += 1
    if epoch % 5 == 0:
        model.eval()
        with torch.no_grad():
            logits, mu, logvar = model(x_test)
            test = elbo(logits, x_test, mu, logvar).item()
        print(
            f"epoch {epoch} train {total.item() / steps:.2f} test {test:.2f} "
            f"{steps / (time.time() - t0):.1f} steps/s"
        )


# In[6]:


with torch.no_grad():
    samples = model.decode(torch.randn(8, 16)).sigmoid()
print("sample mean intensity", samples.mean().item())
