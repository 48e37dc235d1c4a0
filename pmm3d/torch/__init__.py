"""torch modules on a grid, with torch's autograd and optimizers. Linear layers use the schedule of `pmm3d.nn.linear`.

`parallelize` converts a plain module to one that runs on all ranks. No other package of pmm3d imports `pmm3d.torch`.
"""

if __name__ == "torch":
    raise ImportError(
        "this is pmm3d.torch, not torch: the program runs inside the folder of pmm3d, or has it on "
        "sys.path. Start it elsewhere"
    )

from ..errors import needs

with needs("torch", "pmm3d.torch"):
    import array_api_compat as _array_api_compat
    import torch as _torch

from .boundary import gather_output, input_rows, mean
from .convert import parallelize
from .layers import Dropout3D, LayerNorm3D, Linear3D
from .plan import Split
from .state import clip_grad_norm_, full_state_dict, load_full_state_dict

__all__ = [
    "Dropout3D",
    "LayerNorm3D",
    "Linear3D",
    "Split",
    "clip_grad_norm_",
    "full_state_dict",
    "gather_output",
    "input_rows",
    "load_full_state_dict",
    "mean",
    "parallelize",
]
