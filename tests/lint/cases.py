"""Loops, trainers and heads as people write them, each wrong one beside a right one that looks like it."""

from textwrap import dedent, indent

FLAT = """
for epoch in range(epochs):
    for i, (x, y) in enumerate(loader):
        {before}
        loss = {loss}
        {backward}
        {after}
        if {boundary}:
            {clip}
            optimizer.step()
            {end}
            optimizer.zero_grad()
"""
NESTED = """
while step < max_steps:
    {start}
    for micro_step in range(gradient_accumulation_steps):
        x, y = get_batch('train')
        _, loss = model(x, y)
        {scaled}
        scaler.scale(loss).backward()
        {inside}
    {after}
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
"""
ACCELERATE = """
for batch in loader:
    with accelerator.accumulate(model):
        loss = {loss}
        accelerator.backward(loss)
        {clip}
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
    {after}
"""
HF = """
class MyTrainer(Trainer):
    {flag}
    def compute_loss(self, model, inputs, return_outputs=False, {arguments}):
        {body}
        return (loss, outputs) if return_outputs else loss
"""
HEAD = """
@auto_docstring
class Classifier(PreTrainedModel):
    {flag}
    def forward(self, input_ids, labels: {kind} = None, {rest}):
        logits = self.score(self.model(input_ids)[0])
        loss_fct = CrossEntropyLoss()
        loss = {loss}
        return loss, logits
"""


def flat(**parts):
    usual = {"loss": "criterion(model(x), y) / accumulation_steps", "backward": "loss.backward()"}
    usual["boundary"] = "(i + 1) % accumulation_steps == 0"
    return filled(FLAT, usual | parts)


def nested(**parts):
    return filled(NESTED, {"scaled": "loss = loss / gradient_accumulation_steps"} | parts)


def accelerate(**parts):
    return filled(ACCELERATE, {"loss": "model(**batch).loss"} | parts)


def trainer(body, arguments="num_items_in_batch=None", flag=""):
    return filled(HF, {"body": body, "arguments": arguments, "flag": flag})


def head(loss, rest="**kwargs", flag="", kind="Tensor"):
    return filled(HEAD, {"loss": loss, "rest": rest, "flag": flag, "kind": kind})


def filled(text, parts):
    """Put each part in its place; what is not given is `pass`, and a part of several lines keeps its indentation."""
    lines = []
    for line in text.strip().splitlines():
        name = line.strip().strip("{}")
        if line.strip() == f"{{{name}}}":
            lines.append(indent(dedent(parts.get(name) or "pass"), " " * (len(line) - len(line.lstrip()))))
        else:
            lines.append(line.format_map({"loss": "", **parts}))
    return "\n".join(lines)


RATE = "total = len(loader) * epochs{by}\ndone = 0\n" + flat(
    before="for group in optimizer.param_groups:\n    group['lr'] = 1e-3 * done / total", end="done += 1"
)
APART = """
def update(self):
    clip_grad_norm_(self.net.parameters(), 1.0)
    self.scaler.step(self.optimizer)
    self.scaler.update()
"""
PREPARED = "lr_scheduler = made()\nmodel, optimizer, lr_scheduler = accelerator.prepare(model, optimizer, lr_scheduler)\n"
CLIPPED = "if (i + 1) % accumulation_steps == 0:\n    clip_grad_norm_(model.parameters(), 1.0)"
STEP = """
def train_step(self, batch):
    loss_dict["loss"] = loss_dict["loss"] / float(self.grad_accum_steps)
    with self.accelerator.accumulate(self.model):
        self.accelerator.backward(loss_dict["loss"])
"""
BRANCHES = """
if use_scaler:
    scaler.scale(loss).backward()
    norm = clip(scaler, optimizer)
    scaler.step(optimizer)
else:
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
"""
OWN_LOSS = "outputs = model(**inputs)\nloss = weighted_cross_entropy(outputs.logits, inputs['labels'])"
BOTH_ENDS = "(i + 1) % accumulation_steps == 0 or i + 1 == len(loader)"
UNSCALE = "scaler.unscale_(optimizer)\nclip_grad_norm_(model.parameters(), 1.0)"
MASKED = "(losses(x, y) * mask).sum() / mask.sum() / accumulation_steps"

BOTH = """
for i, x in enumerate(loader):
    scaler.scale(g_loss(x) / accumulation_steps).backward()
    if (i + 1) % accumulation_steps == 0:
        scaler.step(g_optimizer)
        {between}
        g_optimizer.zero_grad()
    scaler.scale(d_loss(x) / accumulation_steps).backward()
    if (i + 1) % accumulation_steps == 0:
        scaler.step(d_optimizer)
        scaler.update()
        d_optimizer.zero_grad()
"""

ENGINE = """
engine, _, _, _ = deepspeed.initialize(model=model, config=config)
for batch in loader:
    engine.backward(engine(**batch).loss{by})
    engine.step()
"""
GAN = """
for i, x in enumerate(loader):
    fake = generator(x)
    (-discriminator(fake).mean() / accumulation_steps).backward()
    if (i + 1) % accumulation_steps == 0:
        g_optimizer.step()
        g_optimizer.zero_grad()
    {before}
    d_loss = discriminator(fake.detach()).mean() / accumulation_steps
    d_loss.backward()
    if (i + 1) % accumulation_steps == 0:
        d_optimizer.step()
        d_optimizer.zero_grad()
"""
SCALED = """
for i, x in enumerate(loader):
    {clear}
    update = (i + 1) % accum_iter == 0
    loss_scaler(model(x).loss / accum_iter, optimizer, parameters=model.parameters(), update_grad=update)
    if update:
        optimizer.zero_grad()
"""
QUIET = """
model = DistributedDataParallel(model)
for i, (x, y) in enumerate(loader):
    {before}
    with model.no_sync() if (i + 1) % accumulation_steps else nullcontext():
        {inside}
        loss.backward()
    if (i + 1) % accumulation_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
"""
FORWARD = "loss = criterion(model(x), y) / accumulation_steps"
AGAIN = flat(backward="scaler.scale(loss).backward()").replace(
    "optimizer.step()", "scaler.step(optimizer)\n            scaler.update()"
)
MADE = """
def made(optimizer, batches):
    total = batches * epochs
    return LambdaLR(optimizer, lr_lambda=lambda step: 1 - step / total)
scheduler = made(optimizer, {length})
"""
PIECES = """
pieces = batch_size // micro_batch_size
for _ in range(steps):
    for _ in range(pieces):
        loss = {loss}
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PREPARED_TWO = """
model, other, optimizer, lr_scheduler = accelerator.prepare(model, other, optimizer, lr_scheduler)
other.train()
model.train()
"""
WRONG = {  # name -> (source, the one cause)
    "not divided": (flat(loss="criterion(model(x), y)"), "loss_not_divided"),
    "not divided, an optimizer of one letter": (
        flat(loss="criterion(model(x), y)").replace("optimizer.", "o."),
        "loss_not_divided",
    ),
    "forward outside of no_sync": (QUIET.format(before=FORWARD, inside="pass"), "replicas_not_synchronised"),
    "stepped by the scaler and again": (
        AGAIN.replace("scaler.update()", "scaler.update()\n            optimizer.step()"),
        "gradients_not_cleared",
    ),
    "a schedule whose factory is given the batches": (
        MADE.format(length="len(loader)") + flat(end="scheduler.step()"),
        "schedule_per_micro_batch",
    ),
    "pieces of a batch": (PIECES.format(loss="F.mse_loss(net(x), y)"), "loss_not_divided"),
    "losses in a dictionary": (
        flat(loss="sum(one for one in losses.values())", before="losses, metrics = model(x)"),
        "loss_not_divided",
    ),
    "one of two prepared models": (PREPARED_TWO + accelerate(), "replicas_not_synchronised"),
    "not divided, functional": (flat(loss="F.cross_entropy(model(x), y)"), "loss_not_divided"),
    "not divided, any modulus": (flat(loss="nn.MSELoss()(model(x), y)", boundary="i % 4 == 3"), "loss_not_divided"),
    "not divided, a model's own": (nested(scaled=""), "loss_not_divided"),
    "not divided, weighted": (
        flat(loss="criterion(model(x), y)", backward="loss = 0.5 * loss\nloss.backward()"),
        "loss_not_divided",
    ),
    "divided twice": (accelerate(loss="model(**batch).loss / gradient_accumulation_steps"), "loss_divided_twice"),
    "divided twice in a method": (STEP, "loss_divided_twice"),
    "divided by both": (flat(loss="nll(model(x), y) / num_items_in_batch / accumulation_steps"), "loss_divided_twice"),
    "penalty in full": (flat(loss="criterion(model(x), y) / accumulation_steps + F.mse_loss(a, b)"), "auxiliary_loss_scale"),
    "short window": (flat(boundary=BOTH_ENDS), "short_window_divided_by_n"),
    "short window, named": (
        flat(after=f"update = {BOTH_ENDS}", boundary="update"),
        "short_window_divided_by_n",
    ),
    "padding": (
        flat(loss="F.cross_entropy(model(x), y, ignore_index=0) / accumulation_steps", after="tokens += (y != 0).sum()"),
        "mean_of_means",
    ),
    "mask": (flat(loss=MASKED, after="tokens = mask.sum()"), "mean_of_means"),
    "cleared before each backward": (flat(before="optimizer.zero_grad()"), "gradients_cleared_in_window"),
    "cleared in the inner loop": (nested(inside="optimizer.zero_grad()"), "gradients_cleared_in_window"),
    "cleared before the step": (flat(clip="optimizer.zero_grad()"), "gradients_cleared_in_window"),
    "clipped inside": (flat(after="clip_grad_norm_(model.parameters(), 1.0)"), "clip_per_micro_batch"),
    "clipped inside if asked for": (
        flat(after="if args.clip:\n    clip_grad_norm_(model.parameters(), args.clip)"),
        "clip_per_micro_batch",
    ),
    "clipped inside, accelerate": (
        accelerate(clip="accelerator.clip_grad_norm_(model.parameters(), 1.0)"),
        "clip_per_micro_batch",
    ),
    "clipped before unscaling": (nested(after="clip_grad_norm_(model.parameters(), 1.0)"), "clip_before_unscale"),
    "clipped before unscaling, the backward elsewhere": (APART, "clip_before_unscale"),
    "clipped inside by what one is given": (flat(after="self.grad_clip_fn(model.parameters())"), "clip_per_micro_batch"),
    "a rate over the micro-batches": (RATE.format(by=""), "schedule_per_micro_batch"),
    "schedule inside": (flat(after="scheduler.step()"), "schedule_per_micro_batch"),
    "average inside": (nested(inside="ema.update(model)"), "ema_per_micro_batch"),
    "average inside, accelerate": (accelerate(after="ema_model.step(model.parameters())"), "ema_per_micro_batch"),
    "a schedule that is not prepared": (
        PREPARED.replace(", lr_scheduler", "") + accelerate(),
        "schedule_per_micro_batch",
    ),
    "decay inside": (flat(after="for p in model.parameters():\n    p.data.mul_(1 - lr * decay)"), "weight_decay_per_micro_batch"),
    "clipped every n-th, stepped each time": (
        flat(loss="loss_of(x)", after=CLIPPED, boundary="True"),
        "step_every_micro_batch",
    ),
    "scale updated inside": (nested(inside="scaler.update()"), "scaler_updated_in_window"),
    "step inside": (nested(inside="optimizer.step()"), "step_every_micro_batch"),
    "step without a boundary": (flat(boundary="args.step"), "step_every_micro_batch"),
    "passed over": (flat(backward="if torch.isnan(loss):\n    continue\nloss.backward()"), "non_finite_micro_batch"),
    "multiplied": (flat(loss="criterion(model(x), y) * accumulation_steps"), "loss_not_divided"),
    "differentiated in the branch for one alone": (
        flat(backward="if accumulation_steps == 1:\n    loss.backward()"),
        "window_misplaced",
    ),
    "cleared at the second of a window": (
        flat(before="if (i + 1) % accumulation_steps == 1:\n    optimizer.zero_grad()").rpartition("\n")[0],
        "gradients_not_cleared",
    ),
    "two contexts": (accelerate().replace("(model):", "(model), accelerator.accumulate(head):"), "window_misplaced"),
    "a scaler of two optimizers": (BOTH.format(between="scaler.update()"), "scaler_updated_in_window"),
    "stepped at the boundary and behind it": (
        flat(after="if (i + 1) % accumulation_steps == 0:\n    clip_grad_norm_(p, 1.0)\n    optimizer.step()", boundary="True"),
        "step_every_micro_batch",
    ),
    "clipped inside, a window of tokens": (
        flat(
            after="clip_grad_norm_(p, 1.0)\ncount += y.numel()",
            boundary="count >= enough",
            end="count = 0",
            loss="criterion(model(x), y) / enough",
        ),
        "clip_per_micro_batch",
    ),
    "a step that comes once": (
        "count = 0\n" + flat(boundary="count % accumulation_steps == 0", end="count += 1"),
        "window_misplaced",
    ),
    "a schedule as long as there are micro-batches": (
        "scheduler = CosineAnnealingLR(optimizer, T_max=len(loader) * epochs)\n" + flat(end="scheduler.step()"),
        "schedule_per_micro_batch",
    ),
    "divided, and DeepSpeed divides": (ENGINE.format(by=" / gradient_accumulation_steps"), "loss_divided_twice"),
    "a generator's loss through the discriminator": (GAN.format(before="pass"), "foreign_gradients"),
    "the sum divided each time": (
        flat(loss="criterion(model(x), y)", after="for p in params:\n    p.grad /= accumulation_steps"),
        "sum_rescaled_in_window",
    ),
    "timm's scaler, cleared each time": (SCALED.format(clear="optimizer.zero_grad()"), "gradients_cleared_in_window"),
    "own compute_loss": (trainer(OWN_LOSS), "loss_not_divided"),
    "own compute_loss, the rest ignored": (trainer(OWN_LOSS, "**kwargs"), "loss_not_divided"),
    "count not handed on": (trainer("loss, outputs = super().compute_loss(model, inputs, True)"), "loss_not_divided"),
    "own compute_loss, divided by the usual number": (
        trainer(OWN_LOSS + "\nloss = loss / self.args.gradient_accumulation_steps"),
        "short_window_divided_by_n",
    ),
    "head": (head("loss_fct(logits, labels)"), "loss_not_divided"),
    "head, inherited loss": (head("self.loss_function(logits, labels, self.config)"), "loss_not_divided"),
}
TWO = """
class Trainer:
    def __init__(self):
        self.first, self.second = torch.optim.AdamW(g), torch.optim.AdamW(d)
    def forward_backward(self, of_first):
        loss = self.loss_of_first() if of_first else self.loss_of_second()
        loss.backward()
        clip_grad_norm_(self.net.parameters(), 1.0)
    def train(self):
        while True:
            if self.step % self.ratio == 0:
                self.first.zero_grad()
                self.forward_backward(True)
                self.first.step()
            self.second.zero_grad()
            self.forward_backward(False)
            self.second.step()
            self.step += 1
"""
TOLD_WHEN = """
class Scaled:
    def __init__(self, accumulation_steps):
        self.share = 1 / accumulation_steps
    def backward_step(self, stepping, loss):
        (loss * self.share).backward()
        if stepping:
            self.optimizer.step()
            self.optimizer.zero_grad()
"""
STEPS = "optimizer.step()\nscheduler.step()\noptimizer.zero_grad()"
LAST = "accumulation_steps = min(accumulation_steps, len(loader) - i)"
RIGHT = {
    "textbook": flat(),
    "forward in no_sync": QUIET.format(before="pass", inside=FORWARD),
    "stepped by the scaler": AGAIN,
    "a schedule whose factory is given the steps": MADE.format(length="len(loader) // accumulation_steps")
    + flat(end="scheduler.step()"),
    "pieces of a batch, weighed": PIECES.format(loss="F.mse_loss(net(x), y) * micro_batch_size / batch_size"),
    "both of two prepared models": PREPARED_TWO + accelerate().replace("accumulate(model)", "accumulate(model, other)"),
    "cleared at the start, by an iteration": flat(
        before="if (engine.state.iteration - 1) % accumulation_steps == 0:\n    optimizer.zero_grad()",
        boundary="engine.state.iteration % accumulation_steps == 0",
    ),
    "divided where needed": flat(
        loss="criterion(model(x), y)", before="if n > 1:\n    pass", backward="if n > 1:\n    loss /= n\nloss.backward()"
    ),
    "summed": flat(loss="F.cross_entropy(model(x), y, reduction='sum')"),
    "summed, as a module": "criterion = nn.CrossEntropyLoss(reduction='sum')\n" + flat(loss="criterion(model(x), y)"),
    "told the number": flat(loss="criterion(model(x), y, accumulation_steps)"),
    "gradients divided": flat(
        loss="criterion(model(x), y)", clip="for p in model.parameters():\n    p.grad /= accumulation_steps"
    ),
    "short window counted": flat(before=LAST, boundary=BOTH_ENDS),
    "multiplied back": accelerate(loss="loss_of(batch) * gradient_accumulation_steps / num_items_in_batch"),
    "penalty divided": flat(loss="(criterion(model(x), y) + F.mse_loss(a, b)) / accumulation_steps"),
    "counted by what is kept": "kept = []\n" + flat(after="kept.append(loss)", boundary="len(kept) % accumulation_steps == 0"),
    "nested": nested(after=UNSCALE),
    "cleared at the start": nested(start="optimizer.zero_grad()"),
    "cleared at the start, flat": flat(before="if i % accumulation_steps == 0:\n    optimizer.zero_grad()"),
    "own sums": flat(before="optimizer.zero_grad()", after="for s, p in sums:\n    s += p.grad"),
    "another optimizer cleared": flat(before="critic_optimizer.zero_grad()"),
    "clipped once": flat(clip="clip_grad_norm_(model.parameters(), 1.0)"),
    "clipped once, in its own test": flat(
        after="if (i + 1) % accumulation_steps == 0:\n    clip_grad_norm_(model.parameters(), 1.0)"
    ),
    "clipped and unscaled apart": APART + "def scale(self):\n    self.scaler.unscale_(self.optimizer)",
    "what clips is made": flat(after="clip = make_grad_clip(model.parameters())"),
    "a rate over the steps": RATE.format(by=" // accumulation_steps"),
    "clipped where nothing is scaled": BRANCHES,
    "norm measured": flat(after="norm = clip_grad_norm_(model.parameters(), float('inf'))"),
    "accelerate": accelerate(clip="if accelerator.sync_gradients:\n    accelerator.clip_grad_norm_(model.parameters(), 1.0)"),
    "average of losses": flat(after="ema_loss.update(loss.item())"),
    "schedule by fraction": flat(after="scheduler.step(epoch + i / len(loader))"),
    "schedule once": flat(end="scheduler.step()"),
    "discriminator every n": flat(
        loss="criterion(model(x), y)", backward="loss.backward()\noptimizer.step()", boundary="i % n == 0"
    ),
    "whole window left out": flat(boundary="torch.isfinite(loss)", loss="criterion(model(x), y)"),
    "two optimizers of a class, one every n": TWO,
    "a rehearsal before the training": "for x, y in worst:\n"
    + indent("optimizer.zero_grad()\nloss_of(x).backward()\nclip_grad_norm_(p, 1.0)\noptimizer.step()\n", "    ")
    + "for epoch in range(epochs):\n    for x, y in loader:\n"
    + indent("loss_of(x).backward()\noptimizer.step()\noptimizer.zero_grad()\n", " " * 8),
    "its caller says when": TOLD_WHEN,
    "timm's scaler": SCALED.format(clear="pass"),
    "DeepSpeed divides": ENGINE.format(by=""),
    "a discriminator that is frozen": GAN.format(before="pass").replace("fake = ", "freeze(discriminator)\n    fake = "),
    "a schedule as long as there are steps": "scheduler = CosineAnnealingLR(optimizer, T_max=len(loader) // accumulation_steps)\n"
    + flat(end="scheduler.step()"),
    "a scaler of two optimizers, updated once": BOTH.format(between="pass"),
    "two contexts, one a micro-batch": accelerate() + "\n" + accelerate(),
    "a step in the branch for one alone": flat(backward="loss.backward()\nif accumulation_steps == 1:\n    log(loss)"),
    "a schedule that is prepared": "def made():\n    return get_scheduler()\n" + PREPARED + accelerate(),
    "accumulation over one": "accelerator = Accelerator(gradient_accumulation_steps=1)\n"
    + accelerate().replace("with accelerator.accumulate(model):", "if True:"),
    "a schedule of as many steps as micro-batches": "scheduler = made(optimizer, steps=max_steps * accumulation_steps)\n"
    + flat(after="scheduler.step()"),
    "a limit that is scaled as well": nested(after="clip_grad_norm_(model.parameters(), 1.0 * scaler.get_scale())"),
    "norm measured, by a switch": flat(after="norm = clip_grad_norm_(model.parameters(), 1.0, clip_grad=False)"),
    "a loss of several scales": "for x in loader:\n    for scale in range(3):\n        (loss_of(x) / 2**scale).backward()\n"
    + indent("optimizer.step()\noptimizer.zero_grad()", "    "),
    "a caller's optimizer, cleared by a helper": "def train(loader, optimizer):\n    for x in loader:\n"
    + indent("clear_grads(model)\nloss_of(x).backward()\noptimizer.step()", " " * 8),
    "several losses": "for loss in losses:\n    loss.backward()\noptimizer.step()\noptimizer.zero_grad()",
    "plain": "for x, y in loader:\n" + indent("optimizer.zero_grad()\ncriterion(model(x), y).backward()\n" + STEPS, "    "),
    "minibatches of a rollout": "for x in rollout.split(32):\n" + indent("policy(x).mean().backward()\n" + STEPS, "    "),
    "DeepSpeed": "import deepspeed\nfor x, y in loader:\n    loss = engine(x, y)\n    engine.backward(loss)\n    engine.step()",
    "no labels to count": trainer("loss = loss_of(*collect(inputs))"),
    "flag on the class": trainer(OWN_LOSS, flag="loss_is_scaled_for_ga = False"),
    "flag set": trainer(OWN_LOSS, flag="def __init__(self):\n    self.model_accepts_loss_kwargs = False"),
    "count used": trainer(OWN_LOSS + "\nloss = loss / num_items_in_batch"),
    "divided by the window's own number": trainer(OWN_LOSS + "\nloss = loss / self.current_gradient_accumulation_steps"),
    "count handed on": trainer("loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)"),
    "rest handed on": trainer("loss, outputs = super().compute_loss(model, inputs, True, **kwargs)", "**kwargs"),
    "old signature": trainer(OWN_LOSS, "labels=None"),
    "head without kwargs": head("loss_fct(logits, labels)", "attention_mask=None"),
    "head with count": head("loss_fct(logits, labels, num_items_in_batch)", "num_items_in_batch=None, **kwargs"),
    "head hands on": head("self.loss_function(logits, labels, **kwargs)"),
    "head flagged": head("loss_fct(logits, labels)", flag="accepts_loss_kwargs = False"),
    "head of a bare module": head("loss_fct(logits, labels)").replace("PreTrainedModel", "nn.Module"),
    "a model's own loss": trainer("outputs = model(**inputs)\nloss = outputs.loss"),
    "other labels": trainer("logits = model(**inputs)\nloss = cross_entropy(logits, inputs['target'])"),
    "own step": trainer(
        OWN_LOSS, flag="def training_step(self, model, inputs):\n    return self.compute_loss(model, inputs) / self.n"
    ),
    "head with boxes": head("self.loss_function(logits, labels)", kind="list[dict]"),
}
