"""Keras' fit on torch, whose optimizer accumulates."""

import argparse
import os

os.environ["KERAS_BACKEND"] = "torch"
import keras
import toy

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=8)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
args = parser.parse_args()
keras.utils.set_random_seed(0)
x, y = (part.numpy() for part in toy.data(96).tensors)
model = keras.Sequential([keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(4)])
accumulate = args.gradient_accumulation_steps if args.gradient_accumulation_steps > 1 else None
optimizer = keras.optimizers.Adam(1e-2, gradient_accumulation_steps=accumulate)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum_over_batch_size")
model.compile(optimizer=optimizer, loss=loss)
model.fit(x, y, batch_size=args.batch_size, epochs=20, shuffle=False, callbacks=[keras.callbacks.ModelCheckpoint("last.keras")])
