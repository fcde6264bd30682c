"""Train on two ranks with DDP, FSDP2, accelerate and Lightning. Blocks are compiled, and compute activations twice.

python examples/data_parallel.py
"""

import os
from collections.abc import Callable
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.run import main as torchrun
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from blocktune import attention

RANKS, STEPS, SEQUENCES, TOKENS = 2, 3, 4, 33
WORDS, WIDTH, HEADS = 64, 32, 4
COMPILER = "inductor" if torch.cuda.is_available() else "aot_eager"
"""A GPU is worth the time of PyTorch's compiler, this model is not."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks, self.head = nn.Embedding(WORDS, WIDTH), nn.ModuleList(), nn.Linear(WIDTH, WORDS)
        self.blocks.extend(Block() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss."""
        x = self.words(tokens[:, :-1])
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def new_model(device: str) -> Model:
    torch.manual_seed(0)
    model = Model().to(device)
    for block in model.blocks:
        block.compile(backend=COMPILER, fullgraph=True)
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Tensor, backward: Callable[[Tensor], None]
) -> list[float]:
    losses = []
    for tokens in batches:
        loss = model(tokens)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def with_ddp(batches: Tensor) -> list[float]:
    model = DistributedDataParallel(new_model(batches.device.type))
    return train(model, sgd(model), batches, torch.Tensor.backward)


def with_fsdp2(batches: Tensor) -> list[float]:
    model = new_model(batches.device.type)
    for each in (*model.blocks, model):
        fully_shard(each)
    return train(model, sgd(model), batches, torch.Tensor.backward)


def with_accelerate(batches: Tensor) -> list[float]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=batches.device.type == "cpu")
    model = new_model(batches.device.type)
    model, optimizer = accelerator.prepare(model, sgd(model))
    return train(model, optimizer, batches, accelerator.backward)


def with_lightning(batches: Tensor) -> list[float]:
    from lightning import LightningModule, Trainer

    class Training(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = new_model("cpu"), []

        def training_step(self, tokens: Tensor) -> Tensor:
            loss = self.model(tokens)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    training = Training()
    trainer = Trainer(
        accelerator=batches.device.type,
        devices=RANKS,
        strategy="ddp",
        max_epochs=1,
        use_distributed_sampler=False,
        barebones=True,
    )
    trainer.fit(training, torch.utils.data.DataLoader(batches, batch_size=None))
    return training.losses


WAYS = {"ddp": with_ddp, "fsdp2": with_fsdp2, "accelerate": with_accelerate, "lightning": with_lightning}


def run_rank() -> None:
    """Print how far the losses of each way are from those of one process."""
    device = "cuda" if torch.cuda.device_count() >= RANKS else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, largest = dist.get_rank(), 0.0
    if device == "cuda":
        torch.cuda.set_device(rank)
    tokens = torch.randint(0, WORDS, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(1))
    whole = tokens.to(device).expand(STEPS, -1, -1)
    model = new_model(device)
    wanted = torch.tensor(train(model, sgd(model), whole, torch.Tensor.backward), device=device)
    for name, way in WAYS.items():
        if find_spec(name) is None and name in ("accelerate", "lightning"):
            note = f"skipped, it is not installed: pip install {name}"
        else:
            losses = torch.tensor(way(whole.chunk(RANKS, dim=1)[rank]), device=device)
            dist.all_reduce(losses)
            largest = max(largest, (losses / RANKS - wanted).abs().max().item())
            note = "losses " + ", ".join(f"{loss:.4f}" for loss in (losses / RANKS).tolist())
        if rank == 0:
            print(f"{name}: {note}")
    if rank == 0:
        print(f"largest difference: {largest:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        run_rank()
    else:
        torchrun(["--standalone", f"--nproc-per-node={RANKS}", __file__])
