"""Independent oracles: numpy in float64, written from the textbook formulas; nothing here imports the code under test."""

import numpy as np


def softmax_regression_gradients(weights, bias, x, y):
    """[n, P] per-sample gradients of -log softmax(W x + c)[y], flattened as (W, c)."""
    logits = x @ weights.T + bias
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return np.concatenate([(p[:, :, None] * x[:, None, :]).reshape(len(y), -1), p], axis=1)


def sgd(theta, gradients, lr, momentum=0.0, nesterov=False):
    """Parameters after the gradients, PyTorch's convention: m <- mu m + g (m_0 = g_0); step m, or g + mu m with Nesterov."""
    velocity = None
    for g in gradients:
        velocity = g.copy() if velocity is None else momentum * velocity + g
        theta = theta - lr * (g + momentum * velocity if nesterov else (velocity if momentum else g))
    return theta


def adam(theta, gradients, lr, beta1, beta2, eps, decay=0.0):
    """Parameters after the gradients (Kingma & Ba, algorithm 1); `decay` is AdamW's decoupled weight decay."""
    m, v = np.zeros_like(theta), np.zeros_like(theta)
    for t, g in enumerate(gradients, 1):
        theta = theta * (1 - lr * decay)
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        theta = theta - lr * (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + eps)
    return theta
