"""Module-level code, whose globals a configurator overrides; it evaluates, saves and logs while it trains."""

import os
import pickle

import numpy as np
import torch
from model import GPT, GPTConfig

out_dir = "out"
eval_interval = 2
eval_iters = 200
wandb_log = True
gradient_accumulation_steps = 40
batch_size = 12
learning_rate = 6e-3
max_iters = 600000
warmup_iters = 10
grad_clip = 1.0
config_keys = [k for k, v in globals().items() if not k.startswith("_") and isinstance(v, (int, float, bool, str))]
exec(open("configurator.py").read())
config = {k: globals()[k] for k in config_keys}

os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337)
block_size = GPTConfig.block_size


def get_batch(split):
    data = np.memmap(os.path.join("data", f"{split}.bin"), dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x, y


with open(os.path.join("data", "meta.pkl"), "rb") as f:
    vocab_size = pickle.load(f)["vocab_size"]
model = GPT(GPTConfig(vocab_size=vocab_size))
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.1, betas=(0.9, 0.95))


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)
            losses[k] = model(X, Y)[1].item()
        out[split] = losses.mean()
    model.train()
    return out


if wandb_log:
    import wandb

    wandb.init(project="owt", mode="offline", config=config)

X, Y = get_batch("train")
iter_num = 0
while True:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * min(1.0, (iter_num + 1) / warmup_iters)
    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if wandb_log:
            wandb.log({"iter": iter_num, "val/loss": losses["val"]})
        torch.save({"model": model.state_dict(), "iter_num": iter_num}, os.path.join(out_dir, "ckpt.pt"))
    for micro_step in range(gradient_accumulation_steps):
        logits, loss = model(X, Y)
        loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train")
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.4f}")
    iter_num += 1
    if iter_num > max_iters:
        break
