"""What `net.json.gz` was recorded with: PyTorch 2.13 on a CPU, with stacks, shapes and memory."""

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x))) + x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))


net = Net()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
recorded = {"record_shapes": True, "with_stack": True, "with_modules": True, "with_flops": True, "profile_memory": True}
with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=1, active=2, repeat=1), **recorded) as profiler:
    for _ in range(4):
        net(torch.randn(4, 8, 16, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        profiler.step()
profiler.export_chrome_trace("net.json")
