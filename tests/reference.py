"""Forward pass of BERT in float64 NumPy, head by head, from the paper and without product code.

Weights are {our name: array}. Shape suffixes: L tokens of one text, H hidden size, D head size.
"""

import math

import numpy as np

_erf = np.vectorize(math.erf)


def gelu(x, kind):
    if kind == "gelu":
        return x * 0.5 * (1 + _erf(x / math.sqrt(2)))
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def layer_norm(x, gamma, beta, epsilon):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(
        x.var(-1, keepdims=True) + epsilon
    ) * gamma + beta


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def transformer_layer(hidden_LH, weights, prefix, config):
    """Compute one layer for one text without padding.

    Returns:
        Output [L, H] and attention probabilities [N, L, L].
    """
    w = {
        name.removeprefix(prefix): np.asarray(array, np.float64)
        for name, array in weights.items()
        if name.startswith(prefix)
    }
    size = config.hidden_size // config.num_attention_heads
    contexts, probs = [], []
    for head in range(config.num_attention_heads):
        columns = slice(head * size, (head + 1) * size)
        q, k, v = (
            hidden_LH @ w[f"attention/{part}/kernel"][:, columns]
            + w[f"attention/{part}/bias"][columns]
            for part in ("query", "key", "value")
        )
        probs.append(softmax(q @ k.T / math.sqrt(size)))
        contexts.append(probs[-1] @ v)
    attended = (
        np.concatenate(contexts, -1) @ w["attention/output/kernel"] + w["attention/output/bias"]
    )
    hidden = layer_norm(
        hidden_LH + attended,
        w["attention_norm/gamma"],
        w["attention_norm/beta"],
        config.layer_norm_eps,
    )
    inner = gelu(hidden @ w["intermediate/kernel"] + w["intermediate/bias"], config.hidden_act)
    output = inner @ w["output/kernel"] + w["output/bias"]
    return layer_norm(
        hidden + output, w["output_norm/gamma"], w["output_norm/beta"], config.layer_norm_eps
    ), np.stack(probs)


def encode(input_ids_L, segment_ids_L, weights, config):
    """Encode one text.

    Returns:
        "hidden_states": list of [L, H]; "attentions": list of [N, L, L]; "pooled": [H].
    """
    w = {name: np.asarray(array, np.float64) for name, array in weights.items()}
    hidden = (
        w["bert/embeddings/word_embeddings"][input_ids_L]
        + w["bert/embeddings/token_type_embeddings"][segment_ids_L]
        + w["bert/embeddings/position_embeddings"][: len(input_ids_L)]
    )
    hidden = layer_norm(
        hidden,
        w["bert/embeddings/LayerNorm/gamma"],
        w["bert/embeddings/LayerNorm/beta"],
        config.layer_norm_eps,
    )
    layers, attentions = [hidden], []
    for index in range(config.num_hidden_layers):
        hidden, probs = transformer_layer(hidden, w, f"bert/layer_{index}/", config)
        layers.append(hidden)
        attentions.append(probs)
    pooled = np.tanh(hidden[0] @ w["bert/pooler/kernel"] + w["bert/pooler/bias"])
    return {"hidden_states": layers, "attentions": attentions, "pooled": pooled}


def adamw(
    weights,
    gradients,
    rates,
    decayed,
    bias_correction,
    beta_1=0.9,
    beta_2=0.999,
    epsilon=1e-6,
    decay=0.01,
    clip=1.0,
    lamb=False,
    factors=None,
):
    """Apply AdamW or LAMB updates in float64 and return the last weights.

    Args:
        weights: {name: array}.
        gradients: One {name: array} per step.
        rates: Learning rate of each step.
        decayed: Names of the weights with weight decay.
        bias_correction: Whether moments are divided by 1 - beta^t.
        beta_1: Decay rate of the first moment.
        beta_2: Decay rate of the second moment.
        epsilon: Added to the denominator.
        decay: Rate of weight decay.
        clip: Maximum of the global gradient norm.
        lamb: If true, updates of decayed weights are scaled to the norm of the weights.
        factors: {name: factor of its learning rate}.
    """
    w = {name: np.asarray(array, np.float64) for name, array in weights.items()}
    m = {name: np.zeros_like(array) for name, array in w.items()}
    v = {name: np.zeros_like(array) for name, array in w.items()}
    for step, (grads, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        norm = math.sqrt(
            sum(float((grad.astype(np.float64) ** 2).sum()) for grad in grads.values())
        )
        for name, grad in grads.items():
            grad = grad.astype(np.float64) * min(1.0, clip / norm)
            m[name] = beta_1 * m[name] + (1 - beta_1) * grad
            v[name] = beta_2 * v[name] + (1 - beta_2) * grad**2
            m_hat = m[name] / (1 - beta_1**step) if bias_correction else m[name]
            v_hat = v[name] / (1 - beta_2**step) if bias_correction else v[name]
            update = m_hat / (np.sqrt(v_hat) + epsilon)
            update = update + (decay * w[name] if name in decayed else 0)
            if lamb and name in decayed:
                update *= np.linalg.norm(w[name]) / np.linalg.norm(update)
            w[name] = w[name] - rate * (factors or {}).get(name, 1.0) * update
    return w


def assert_equal(actual, expected, num_layers):
    """Assert equality within 1e-5 of the largest value up to 6 layers, 5e-5 for more (float32)."""
    tolerance = (1e-5 if num_layers <= 6 else 5e-5) * max(1.0, np.abs(expected).max())
    difference = np.abs(np.asarray(actual, np.float64) - expected).max()
    assert difference <= tolerance, f"differs by {difference:.2e}, expected at most {tolerance:.2e}"
