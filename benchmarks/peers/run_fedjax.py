"""FedJAX: compiled steps, one client after the other, on XLA's own threads.

Its models have no state beside parameters, so the batch norms have no running statistics: less work than the others do.
"""

from __future__ import annotations

import jax

# FedJAX was written for a jax that had this name at the top.
if not hasattr(jax, "tree_map"):
    jax.tree_map = jax.tree_util.tree_map

import fedjax
import jax.numpy as jnp
import numpy as np
from workload import BATCH, CLIENTS, EXAMPLES, LR, Clock, arguments, tell


def block(x, weights):  # type: ignore[no-untyped-def]
    """Convolution, batch norm, ReLU, pooling."""
    x = jax.lax.conv_general_dilated(
        x, weights["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    ) + weights["bias"]  # fmt: skip
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    x = (x - mean) * jax.lax.rsqrt(var + 1e-5) * weights["gamma"] + weights["beta"]
    return jax.lax.reduce_window(jax.nn.relu(x), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def loss(params, batch, rng):  # type: ignore[no-untyped-def]
    x = block(block(batch["x"], params["one"]), params["two"]).reshape(len(batch["x"]), -1)
    logits = x @ params["head"]["kernel"] + params["head"]["bias"]
    return -jax.nn.log_softmax(logits)[jnp.arange(len(logits)), batch["y"]].mean()


def weights(draw: np.random.Generator, inputs: int, outputs: int) -> dict[str, jax.Array]:
    kernel = draw.normal(0, 0.1, (3, 3, inputs, outputs))
    zeros, ones = np.zeros(outputs), np.ones(outputs)
    found = {"kernel": kernel, "bias": zeros, "gamma": ones, "beta": zeros}
    return {name: jnp.asarray(value, jnp.float32) for name, value in found.items()}


given = arguments()
draw = np.random.default_rng(0)
head = {"kernel": draw.normal(0, 0.02, (2048, 10)), "bias": np.zeros(10)}
params = {"one": weights(draw, 3, 16), "two": weights(draw, 16, 32)}
params["head"] = {name: jnp.asarray(value, jnp.float32) for name, value in head.items()}


def client(number: int):  # type: ignore[no-untyped-def]
    x = draw.normal(size=(EXAMPLES, 32, 32, 3)).astype(np.float32)
    data = fedjax.ClientDataset({"x": x, "y": draw.integers(0, 10, EXAMPLES)})
    return str(number).encode(), data, jax.random.PRNGKey(number)


clients = [client(number) for number in range(CLIENTS)]
algorithm = fedjax.algorithms.fed_avg.federated_averaging(
    jax.grad(loss),
    fedjax.optimizers.sgd(LR),
    fedjax.optimizers.sgd(1.0),
    fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH, num_steps=given.steps, num_epochs=None, seed=0),
)
state = algorithm.init(params)
clock = Clock()
for _ in range(given.rounds):
    state, _ = algorithm.apply(state, clients)
    jax.block_until_ready(state.params)
    clock.tick()
tell("fedjax", "fedjax", f"jax {jax.__version__}, XLA's threads", clock)
