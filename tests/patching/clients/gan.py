"""A GAN with two optimizers, a gradient penalty and spectral norm."""

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

torch.manual_seed(17)
generator = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2))
critic = nn.Sequential(
    spectral_norm(nn.Linear(2, 32)), nn.LeakyReLU(0.2), nn.Linear(32, 1)
)
opt_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(critic.parameters(), lr=4e-4, betas=(0.5, 0.999))
bce = nn.BCEWithLogitsLoss()
losses = []
for _ in range(16):
    angle = 6.28 * torch.rand(64)
    real = torch.stack([angle.cos(), angle.sin()], dim=1)
    fake = generator(torch.randn(64, 8))
    opt_d.zero_grad()
    real.requires_grad_()
    scores = critic(real)
    (slope,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
    penalty = slope.square().sum(1).mean()
    d_loss = bce(scores, torch.ones(64, 1)) + bce(
        critic(fake.detach()), torch.zeros(64, 1)
    )
    (d_loss + 0.1 * penalty).backward()
    opt_d.step()
    opt_g.zero_grad()
    g_loss = bce(critic(fake), torch.ones(64, 1))
    g_loss.backward()
    opt_g.step()
    losses += [d_loss.item(), g_loss.item()]
print(losses[-2:])
torch.save(
    {
        "losses": losses,
        "generator": generator.state_dict(),
        "critic": critic.state_dict(),
        "opt_g": opt_g.state_dict(),
        "opt_d": opt_d.state_dict(),
    },
    "final.pt",
)
