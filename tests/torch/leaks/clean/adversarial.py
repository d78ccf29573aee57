import torch
from torch import nn

generator, critic = nn.Linear(8, 32), nn.Linear(32, 1)
of_generator = torch.optim.Adam(generator.parameters())
of_critic = torch.optim.Adam(critic.parameters())
for _ in range(500):
    fake = generator(torch.randn(16, 8))
    loss = critic(fake.detach()).mean() - critic(torch.randn(16, 32)).mean()
    of_critic.zero_grad()
    loss.backward()
    of_critic.step()
    of_generator.zero_grad()
    (-critic(fake).mean()).backward()
    of_generator.step()
