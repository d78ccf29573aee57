"""DCGAN on scikit-learn's digits, with two optimizers."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NZ, NGF, NDF, BATCH = 64, 48, 12, 32


def weights_init(m):
    name = type(m).__name__
    if "Conv" in name:
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif "BatchNorm" in name:
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


netG = nn.Sequential(
    nn.ConvTranspose2d(NZ, NGF * 4, 4, 1, 0, bias=False),
    nn.BatchNorm2d(NGF * 4),
    nn.ReLU(True),
    nn.ConvTranspose2d(NGF * 4, NGF * 2, 4, 2, 1, bias=False),
    nn.BatchNorm2d(NGF * 2),
    nn.ReLU(True),
    nn.ConvTranspose2d(NGF * 2, NGF, 4, 2, 1, bias=False),
    nn.BatchNorm2d(NGF),
    nn.ReLU(True),
    nn.ConvTranspose2d(NGF, 1, 4, 2, 1, bias=False),
    nn.Tanh(),
)
netD = nn.Sequential(
    nn.Conv2d(1, NDF, 4, 2, 1, bias=False),
    nn.LeakyReLU(0.2),
    nn.Conv2d(NDF, NDF * 2, 4, 2, 1, bias=False),
    nn.BatchNorm2d(NDF * 2),
    nn.LeakyReLU(0.2),
    nn.Conv2d(NDF * 2, 1, 8, 1, 0, bias=False),
    nn.Flatten(0),
)

torch.manual_seed(999)
netG.apply(weights_init)
netD.apply(weights_init)
images = torch.from_numpy(load_digits().images).float()[:, None] / 8 - 1
images = nn.functional.interpolate(images, size=32, mode="bilinear")
loader = DataLoader(
    TensorDataset(images), batch_size=BATCH, shuffle=True, drop_last=True
)
criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
real_label, fake_label = torch.ones(BATCH), torch.zeros(BATCH)

for epoch in range(2):
    for i, (real,) in enumerate(loader):
        # the discriminator, five times as Wasserstein GANs do
        for _ in range(5):
            netD.zero_grad()
            errD_real = criterion(netD(real), real_label)
            errD_real.backward()
            fake = netG(torch.randn(BATCH, NZ, 1, 1))
            errD_fake = criterion(netD(fake.detach()), fake_label)
            errD_fake.backward()
            optimizerD.step()
        # the generator
        netG.zero_grad()
        fake = netG(torch.randn(BATCH, NZ, 1, 1))
        errG = criterion(netD(fake), real_label)
        errG.backward()
        optimizerG.step()
        if i % 20 == 0:
            print(f"{epoch}:{i} D {errD_real + errD_fake:.2f} G {errG:.2f}")
