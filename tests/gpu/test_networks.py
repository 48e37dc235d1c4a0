"""Training on device arrays, compared with NumPy in float64; `pmm3d.torch` compared with the plain torch module in
float64."""

from __future__ import annotations

from functools import partial
from itertools import cycle, product

import numpy as np
import pytest
from loops import given

from gpu.cases import DEVICES, TORCHS, TRAINED, TRANSPORTS, cases, check_error, common, gpu, ranks, relative_error, wide
from gpu.test_products import needs_transport
from pmm3d import DistMatrix, Grid, Layout, nn
from pmm3d.arrays import library_named
from pmm3d.nn import functional, optim
from pmm3d.nn.optimizer_state import is_state

pytestmark = [pytest.mark.nightly("trainings on arrays of the stand-in"), *gpu]
STEPS, BATCH, WIDTHS = 5, 96, (37, 64, 51, 12)
INPUT = Layout(("data", "z"), "y")
NETWORKS = {
    1: [((1, 1, 1), 1)],
    2: [((2, 1, 1), 1), ((1, 1, 2), 1), ((1, 1, 1), 2)],
    4: [((2, 2, 1), 1), ((1, 1, 2), 2)],
    8: [((2, 1, 2), 2)],
}
"""Number of ranks -> grid shapes, each with the size of the data axis."""
OPTIMIZERS = {
    "SGD": partial(optim.SGD, lr=1.0, momentum=0.9),
    "AdamW": partial(optim.AdamW, lr=1e-2, weight_decay=0.1, eps=1e-4),
}
"""The rates change the weights by a sixth: unchanged weights are found in any precision. The large eps keeps rounding
from deciding the direction of an element."""
CLIP = 0.3
"""Largest norm of the gradient. Two or three of the five gradients are clipped."""
OVERFLOWING = 2.0**30
"""A loss scale at which float16 gradients are not finite."""
OF_STATES = 5.0
"""Tolerance of optimizer states as a multiple of that of weights: states are gradients, after both passes."""


@cases("library,precision", TRAINED)
@ranks(1, 2, 8)
def test_training(comm, library, precision, result):
    networks, names = NETWORKS[comm.size], [*OPTIMIZERS]
    ways = (
        [*product(networks, names)]
        if comm.size == 1
        else [*zip(networks, cycle(names[TRAINED.index(precision) % 2 :] + names))]
    )
    check_trainings(comm, library, precision, "auto", ways, result)


@cases("library,precision,transport", common, TRANSPORTS, of=DEVICES)
@ranks(2, 4, 8)
def test_training_over(comm, library, precision, transport, result):
    needs_transport(comm, library, transport)
    way = way_over(transport, common(library).index(precision), comm.size)
    check_trainings(comm, library, precision, transport, [way], result)


def way_over(transport, number, ranks):
    """(network, optimizer) of a training over a transport. They change with transport and precision: each costs time.

    number  0 for float32, 1 for the 2-byte type
    """
    ways = [*product(NETWORKS[ranks], OPTIMIZERS)]
    return ways[(TRANSPORTS.index(transport) + number * len(ways) // 2) % len(ways)]


def check_trainings(comm, library, precision, transport, ways, result):
    """Train on these networks by these optimizers; in float16 also with a loss scale that overflows at first."""
    errors, skipped = [], 0
    for (shape, data), optimizer in ways:
        with given(grid=shape, data=data, optimizer=optimizer):
            overflows = precision == "float16" and transport == "auto" and (comm.size > 1 or optimizer == "AdamW")
            found = train_beside_numpy(comm, library, precision, optimizer, shape, data, transport, overflows)
            errors.append(max(found["losses"], found["weights"]))
            skipped += found["skipped"]
    result(
        f"relative error of losses and weights {max(errors):.1e}, {len(errors)} trainings, {skipped} skipped steps",
        error=max(errors),
        skipped=skipped,
    )


def train_beside_numpy(comm, library, precision, optimizer, shape=(1, 1, 1), data=1, transport="auto", overflows=False):
    """Five steps. Check losses, weights (in low precision the master weights) and optimizer states; return their
    errors, and the number of skipped steps."""
    found, skipped = _trained(comm, library, precision, optimizer, shape, data, transport, overflows)
    expected, _ = _trained(comm, "numpy", "float64", optimizer, shape, data, "auto", overflows)
    errors = {what: relative_error(vector, expected[what]) for what, vector in found.items()}
    for what, error in errors.items():
        check_error(error, precision, what, 1.0 if what in ("losses", "weights") else OF_STATES)
    assert (skipped > 0) == overflows, f"{skipped} steps were skipped"
    return errors | {"skipped": skipped}


def _trained(comm, library, precision, optimizer, shape, data, transport, overflows):
    """Losses, weights and optimizer states by kind, as vectors; number of skipped steps."""
    dtype = precision if precision in ("float32", "float64") else "float32"
    chosen = {"dtype": dtype} if precision == dtype else {"precision": precision}
    scale = optim.LossScale(OVERFLOWING if overflows else 2.0**16, most=OVERFLOWING)
    with Grid(comm, shape, data, device_transport=transport) as grid:
        net = nn.MLP(grid, WIDTHS, nn.gelu, norm=True, seed=3, library=library, **chosen)
        opt = OPTIMIZERS[optimizer](net.parameters())
        x = DistMatrix.random(grid, (BATCH, WIDTHS[0]), seed=4, dtype=dtype, layout=INPUT, library=library)
        y = DistMatrix.random(grid, (BATCH, WIDTHS[-1]), seed=5, dtype=dtype, layout=net.output_layout, library=library)
        losses = []
        while len(losses) < STEPS:
            losses += _step(net, opt, scale if precision == "float16" else None, x, y)
        vectors = {"losses": np.array(losses), "weights": _vector(net.state_dict()), **_states(opt)}
    return vectors, scale.skipped


def _step(net, opt, scale, x, y):
    """[loss], or [] if the step was skipped."""
    loss = nn.mse(net(x), y)
    if scale is None:
        loss.backward()
        opt.clip(CLIP)
        opt.step()
        return [loss.item()]
    loss.backward(scale=scale.value)
    return [loss.item()] if scale.step(opt, clip=CLIP) else []


def _states(opt):
    """Optimizer states by kind: "momentum"; "mean" and "square"."""
    kinds = {}
    for name, matrix in opt.matrices().items():
        if is_state(name):
            kinds.setdefault(name.rpartition("/")[2], {})[name] = matrix
    return {kind: _vector(matrices) for kind, matrices in kinds.items()}


def _vector(matrices):
    return np.concatenate([wide(matrix.gather()).reshape(-1) for matrix in matrices.values()])


SHAPE, ROW = (37, 53), (1, 53)
FUNCTIONS = {
    "relu": (nn.relu, [SHAPE]),
    "tanh": (nn.tanh, [SHAPE]),
    "sigmoid": (nn.sigmoid, [SHAPE]),
    "silu": (nn.silu, [SHAPE]),
    "gelu": (nn.gelu, [SHAPE]),
    "dropout": (partial(functional.dropout, p=0.5, seed=2), [SHAPE]),
    "layer_norm": (functional.layer_norm, [SHAPE, ROW, ROW]),
    "mse": (nn.mse, [SHAPE, SHAPE]),
}
"""Functions of tensors, and the shapes of their arguments."""


@cases("library,precision", ("float32", "float16", "bfloat16"))
@ranks(1)
def test_functions(comm, library, precision, result):
    errors = {}
    for name in FUNCTIONS:
        with given(function=name):
            errors[name] = function_error(comm, library, name, precision)
    worst = max(errors, key=errors.get)
    result(
        f"relative error {errors[worst]:.1e} ({worst}) in {len(errors)} functions", error=errors[worst], errors=errors
    )


def function_error(comm, library, name, precision):
    """Check the value of a function and its gradients. Return the largest error."""
    with Grid(comm) as grid:
        found = _value_and_gradients(grid, name, library, precision)
        expected = _value_and_gradients(grid, name, "numpy", "float64")
    errors = {part: relative_error(array, expected[part]) for part, array in found.items()}
    for part, error in errors.items():
        check_error(error, precision, part)
    return max(errors.values())


def _value_and_gradients(grid, name, library, dtype):
    function, shapes = FUNCTIONS[name]
    given = [
        nn.Tensor(_matrix(grid, shape, seed, library, dtype), requires_grad=True) for seed, shape in enumerate(shapes)
    ]
    out = function(*given)
    out.backward(_matrix(grid, out.shape, len(given), library, out.dtype))
    gradients = {
        f"gradient of argument {place}": wide(tensor.grad.gather())
        for place, tensor in enumerate(given, 1)
        if tensor.grad is not None
    }
    return {"value": wide(out.gather()), **gradients}


def _matrix(grid, shape, seed, library, dtype):
    """Multiples of 1/64 between -4 and 4, which all types represent."""
    values = np.random.default_rng(seed).integers(-255, 256, shape) / 64.0
    return DistMatrix.from_global(grid, library_named(library).from_numpy(values, dtype), layout=Layout())


@cases("library,precision", ("float32", "bfloat16", "tf32"), of=TORCHS)
@ranks(1, 2, 4, 8)
def test_torch_module(comm, library, precision, result):
    """Five steps of a torch module on the grid: losses and weights."""
    import torch

    torch.set_num_threads(1)
    rounding, errors = torch.backends.cuda.matmul, []
    before = rounding.fp32_precision
    plain = _module(torch, torch.float64)
    losses = _module_trained(torch, plain, *_batch(torch, torch.float64), torch.mean, torch.nn.utils.clip_grad_norm_)
    expected = losses, _flat(plain.state_dict())
    for shape, data in NETWORKS[comm.size]:
        with given(grid=shape, data=data):
            try:
                rounding.fp32_precision = "tf32" if precision == "tf32" else "ieee"
                found = _on_the_grid(torch, comm, shape, data, library, precision)
            finally:
                rounding.fp32_precision = before
            errors.append(max(relative_error(*pair) for pair in zip(found, expected)))
            check_error(errors[-1], precision, "losses and weights")
    assert max(errors) > 0
    result(f"relative error of losses and weights {max(errors):.1e}", error=max(errors))


def _on_the_grid(torch, comm, shape, data, library, precision):
    """Losses and weights of the parallelized module."""
    from pmm3d.torch import clip_grad_norm_, full_state_dict, input_rows, mean, parallelize

    dtype = getattr(torch, "float32" if precision == "tf32" else precision)
    device = "cuda" if library == "torch:cuda" else "cpu"
    with Grid(comm, shape, data) as grid:
        model = parallelize(_module(torch, dtype).to(device), grid)
        x, y = (input_rows(grid, part.to(device)) for part in _batch(torch, dtype))
        losses = _module_trained(torch, model, x, y, lambda each: mean(grid, each), clip_grad_norm_)
        return losses, _flat(full_state_dict(model))


def _module(torch, dtype):
    """The same module on every rank, with weights that float32 represents."""
    nn = torch.nn
    torch.manual_seed(3)
    first, second, third, last = WIDTHS
    return nn.Sequential(
        nn.Linear(first, second),
        nn.GELU(),
        nn.LayerNorm(second),
        nn.Linear(second, third),
        nn.GELU(),
        nn.Linear(third, last),
    ).to(dtype)


def _batch(torch, dtype):
    random = torch.Generator().manual_seed(4)
    return (torch.randn(BATCH, width, generator=random).to(dtype) for width in (WIDTHS[0], WIDTHS[-1]))


def _module_trained(torch, model, x, y, mean, clip):
    """Losses of SGD with momentum and clipping. mean: of the losses; clip: clips the norm of the gradients."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    for _ in range(STEPS):
        loss = mean(torch.nn.functional.mse_loss(model(x), y, reduction="none"))
        loss.backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return np.array(losses)


def _flat(state):
    """All values of a state dict, on the host, in double precision."""
    return np.concatenate([value.detach().double().cpu().reshape(-1).numpy() for value in state.values()])
