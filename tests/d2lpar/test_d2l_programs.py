"""d2lpar imported as d2l, without d2l, runs programs of the shape of d2l 13.1 to 14.2.

The sizes are small, the rest is what d2l's notebooks say: `torch.cuda`, and names of d2l. Two
virtual GPUs take the place of CUDA's, as for any other program.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

START = """
import sys, warnings
sys.modules["d2l"] = None  # as if it were not installed
warnings.simplefilter("error")
import torch
from torch import nn
from torch.nn import functional as F
import d2lpar as d2l
torch.manual_seed(0)

def small(batch_size):  # Fashion-MNIST, two batches and one
    generator = torch.Generator().manual_seed(1)
    X = torch.rand(3, batch_size, 1, 28, 28, generator=generator)
    y = torch.randint(10, (3, batch_size), generator=generator)
    return list(zip(X, y))[:2], list(zip(X, y))[2:]
"""

PROGRAMS = {
    "13.1": """
def get_net():
    return nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(),
                         nn.Linear(128, 2))

class Benchmark:
    def __init__(self, description='Done'):
        self.description = description
    def __enter__(self):
        self.timer = d2l.Timer()
        return self
    def __exit__(self, *args):
        print(f'{self.description}: {self.timer.stop():.4f} sec')

x, net = torch.randn(size=(1, 512)), get_net()
for each in (Benchmark, d2l.Benchmark):
    with each('Without torchscript'):
        for i in range(10):
            net(x)
""",
    "13.2": """
device = d2l.try_gpu()
with d2l.Benchmark('torch'):
    for _ in range(10):
        a = torch.randn(size=(100, 100), device=device)
        b = torch.mm(a, a)
with d2l.Benchmark():
    b = torch.mm(a, a)
    torch.cuda.synchronize(device)
x, y = torch.ones((1, 2), device=device), torch.ones((1, 2), device=device)
print(x * y + 2)
""",
    "13.3": """
devices = d2l.try_all_gpus()
def run(x):
    return [x.mm(x) for _ in range(5)]
x_gpu1 = torch.rand(size=(100, 100), device=devices[0])
x_gpu2 = torch.rand(size=(100, 100), device=devices[1])
run(x_gpu1)
run(x_gpu2)
torch.cuda.synchronize(devices[0])
torch.cuda.synchronize(devices[1])
with d2l.Benchmark('GPU1 & GPU2'):
    run(x_gpu1)
    run(x_gpu2)
    torch.cuda.synchronize()
def copy_to_cpu(x, non_blocking=False):
    return [y.to('cpu', non_blocking=non_blocking) for y in x]
with d2l.Benchmark('Run on GPU1 and copy to CPU'):
    y = run(x_gpu1)
    y_cpu = copy_to_cpu(y, True)
    torch.cuda.synchronize()
""",
    "13.5": """
d2l.load_data_fashion_mnist = small
shapes = (20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,), (800, 128), (128,), (128, 10), (10,)
params = [torch.randn(size=shape) * 0.01 * (len(shape) > 1) for shape in shapes]
def lenet(X, params):
    W1, b1, W2, b2, W3, b3, W4, b4 = params
    h = F.avg_pool2d(F.relu(F.conv2d(X, W1, b1)), (2, 2), (2, 2))
    h = F.avg_pool2d(F.relu(F.conv2d(h, W2, b2)), (2, 2), (2, 2)).reshape(len(X), -1)
    return torch.mm(F.relu(torch.mm(h, W3) + b3), W4) + b4
loss = nn.CrossEntropyLoss(reduction='none')
def get_params(params, device):
    new_params = [p.to(device) for p in params]
    for p in new_params:
        p.requires_grad_()
    return new_params
print('b1 grad:', get_params(params, d2l.try_gpu(0))[1].grad)
def allreduce(data):
    for i in range(1, len(data)):
        data[0][:] += data[i].to(data[0].device)
    for i in range(1, len(data)):
        data[i][:] = data[0].to(data[i].device)
data = [torch.ones((1, 2), device=d2l.try_gpu(i)) * (i + 1) for i in range(2)]
allreduce(data)
print('after allreduce:', *data)
devices = [torch.device('cuda:0'), torch.device('cuda:1')]
print('output:', nn.parallel.scatter(torch.arange(20).reshape(4, 5), devices))
def train_batch(X, y, device_params, devices, lr):
    X_shards, y_shards = d2l.split_batch(X, y, devices)
    ls = [loss(lenet(X_shard, device_W), y_shard).sum()
          for X_shard, y_shard, device_W in zip(X_shards, y_shards, device_params)]
    for l in ls:
        l.backward()
    with torch.no_grad():
        for i in range(len(device_params[0])):
            allreduce([device_params[c][i].grad for c in range(len(devices))])
    for param in device_params:
        d2l.sgd(param, lr, X.shape[0])
def train(num_gpus, batch_size, lr):
    train_iter, test_iter = d2l.load_data_fashion_mnist(batch_size)
    devices = [d2l.try_gpu(i) for i in range(num_gpus)]
    device_params = [get_params(params, d) for d in devices]
    num_epochs = 2
    animator = d2l.Animator('epoch', 'test acc', xlim=[1, num_epochs])
    timer = d2l.Timer()
    for epoch in range(num_epochs):
        timer.start()
        for X, y in train_iter:
            train_batch(X, y, device_params, devices, lr)
            torch.cuda.synchronize()
        timer.stop()
        animator.add(epoch + 1, (d2l.evaluate_accuracy_gpu(
            lambda x: lenet(x, device_params[0]), test_iter, devices[0]),))
    print(f'test acc: {animator.Y[0][-1]:.2f}, {timer.avg():.1f} sec/epoch on {str(devices)}')
train(num_gpus=1, batch_size=32, lr=0.2)
train(num_gpus=2, batch_size=32, lr=0.2)
""",
    "13.6": """
d2l.load_data_fashion_mnist = small
net, devices = d2l.resnet18(10), d2l.try_all_gpus()
def train(net, num_gpus, batch_size, lr):
    train_iter, test_iter = d2l.load_data_fashion_mnist(batch_size)
    devices = [d2l.try_gpu(i) for i in range(num_gpus)]
    def init_weights(m):
        if type(m) in [nn.Linear, nn.Conv2d]:
            nn.init.normal_(m.weight, std=0.01)
    net.apply(init_weights)
    net = nn.DataParallel(net, device_ids=devices).to(devices[0])
    trainer = torch.optim.SGD(net.parameters(), lr)
    loss = nn.CrossEntropyLoss()
    timer, num_epochs = d2l.Timer(), 1
    animator = d2l.Animator('epoch', 'test acc', xlim=[1, num_epochs])
    for epoch in range(num_epochs):
        net.train()
        timer.start()
        for X, y in train_iter:
            trainer.zero_grad()
            X, y = X.to(devices[0]), y.to(devices[0])
            l = loss(net(X), y)
            l.backward()
            trainer.step()
        timer.stop()
        animator.add(epoch + 1, (d2l.evaluate_accuracy_gpu(net, test_iter),))
    print(f'test acc: {animator.Y[0][-1]:.2f}, {timer.avg():.1f} sec/epoch on {str(devices)}')
train(net, num_gpus=1, batch_size=4, lr=0.1)
train(net, num_gpus=2, batch_size=8, lr=0.2)
""",
    "14.1": """
train_iter, test_iter = ([(X.expand(-1, 3, -1, -1), y) for X, y in it] for it in small(8))
def init_weights(m):
    if type(m) in [nn.Linear, nn.Conv2d]:
        nn.init.xavier_uniform_(m.weight)
batch_size, devices, net = 8, d2l.try_all_gpus(), d2l.resnet18(10, 3)
net.apply(init_weights)
loss = nn.CrossEntropyLoss(reduction="none")
trainer = torch.optim.Adam(net.parameters(), lr=0.001)
d2l.train_ch13(net, train_iter, test_iter, loss, trainer, 1, devices)
l, acc = d2l.train_batch_ch13(net, *train_iter[0], loss, trainer, devices)
print(l.shape, 0 <= acc <= 8, d2l.accuracy(torch.eye(2), torch.arange(2)))
""",
    "14.2": """
train_iter, test_iter = ([(X.flatten(1), y % 2) for X, y in it] for it in small(16))
net = nn.Sequential()
net.add_module("body", nn.Linear(784, 8))
net.add_module("fc", nn.Linear(8, 2))
nn.init.xavier_uniform_(net.fc.weight)
params_1x = [p for name, p in net.named_parameters() if name not in ["fc.weight", "fc.bias"]]
trainer = torch.optim.SGD([{'params': params_1x}, {'params': net.fc.parameters(), 'lr': 0.05}],
                          lr=0.005, weight_decay=0.001)
loss = nn.CrossEntropyLoss(reduction="none")
d2l.train_ch13(net, train_iter, test_iter, loss, trainer, num_epochs=2)
""",
}

TIME, ONE = r"\d+\.\d{4} sec", r"\[device\(type='cuda', index=0\)\]"
TWO = ONE[:-2] + r", device\(type='cuda', index=1\)\]"
CH13 = (
    r"loss \d+\.\d{3}, train acc [01]\.\d{3}, test acc [01]\.\d{3}\n\d+\.\d examples/sec on " + TWO
)
TRAINED = rf"test acc: [01]\.\d\d, \d+\.\d sec/epoch on {ONE}\n" + (
    rf"test acc: [01]\.\d\d, \d+\.\d sec/epoch on {TWO}\n"
)
EXPECTED = {
    "13.1": rf"(Without torchscript: {TIME}\n){{2}}",
    "13.2": rf"torch: {TIME}\nDone: {TIME}\ntensor\(\[\[3., 3.\]\], device='cuda:0'\)\n",
    "13.3": rf"GPU1 & GPU2: {TIME}\nRun on GPU1 and copy to CPU: {TIME}\n",
    "13.5": (
        r"b1 grad: None\nafter allreduce: tensor\(\[\[3., 3.\]\], device='cuda:0'\) "
        r"tensor\(\[\[3., 3.\]\], device='cuda:1'\)\noutput: \(tensor\(\[\[0, 1, 2, 3, 4\],\s+"
        r"\[5, 6, 7, 8, 9\]\], device='cuda:0'\), tensor\(\[\[10, 11, 12, 13, 14\],\s+"
        r"\[15, 16, 17, 18, 19\]\], device='cuda:1'\)\)\n" + TRAINED
    ),
    "13.6": TRAINED,
    "14.1": CH13 + r"\ntorch.Size\(\[\]\) True 2.0\n",
    "14.2": CH13 + "\n",
}


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """Run all programs, one after the other, in one process; return what each printed."""
    path = tmp_path_factory.mktemp("programs") / "programs.py"
    parts = [f"print('== {name}')\n{program}" for name, program in PROGRAMS.items()]
    path.write_text("\n".join([START, *parts, "print('matplotlib' in sys.modules)"]))
    command = [sys.executable, "-m", "vgpu", "run", "--gpus", "2", sys.executable, str(path)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=300)
    assert done.returncode == 0, done.stderr
    texts = re.findall(r"^== (\S+)\n(.*?)(?=^== |^False$)", done.stdout, re.MULTILINE | re.DOTALL)
    return dict(texts)


@pytest.mark.parametrize("section", PROGRAMS)
def test_a_program_of_d2l_runs_and_prints_its_lines(printed, section):
    assert re.fullmatch(EXPECTED[section], printed[section]), printed[section]
