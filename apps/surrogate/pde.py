"""The problem to learn: a plume is released at a point, spreads, drifts with the wind, and is absorbed at the walls.

    -div(kappa grad u) + b . grad u = f    on the unit square,    u = 0 on its walls,

with a Gaussian release f of total 1 and a wind b = (wind x, wind y) + swirl * rotation about the centre. Samples differ
in the seven PARAMETERS. For another problem, change PARAMETERS and Plume.
"""

import numpy as np
from scipy import sparse
from scipy.sparse.linalg import splu
from scipy.special import exprel

PARAMETERS = (
    ("log10 diffusivity", -2.0, -1.0),
    ("wind x", -1.0, 1.0),
    ("wind y", -1.0, 1.0),
    ("swirl", -1.0, 1.0),
    ("source x", 0.2, 0.8),
    ("source y", 0.2, 0.8),
    ("source width", 0.05, 0.15),
)
"""Name, lowest and highest value of each parameter."""


class AdvectionDiffusion:
    """Exponentially fitted finite volumes (Scharfetter and Gummel, IEEE Trans. Electron Devices 16, 1969) on n x n
    interior points of the unit square, zero on the walls. The error is of second order in the spacing. For a wind
    without divergence, the matrix is an M-matrix at any Peclet number: the field does not oscillate or become negative.

    Fields are arrays of n rows (y) and n columns (x).
    """

    def __init__(self, points: int):
        self.points, self.spacing = points, 1 / (points + 1)
        self.nodes = self.spacing * np.arange(1, points + 1)
        self.faces = self.spacing * (np.arange(points + 1) + 0.5)

    def operator(self, diffusivity: float, wind) -> sparse.csc_matrix:
        """The matrix of u -> -div(kappa grad u) + b . grad u; wind(x, y) gives the two components of b."""
        n, nodes, faces = self.points, self.nodes, self.faces
        leaves_x, returns_x = self._exchange(diffusivity, wind(faces[None, :], nodes[:, None])[0], (n, n + 1))
        leaves_y, returns_y = self._exchange(diffusivity, wind(nodes[None, :], faces[:, None])[1], (n + 1, n))
        centre = leaves_x[:, 1:] + returns_x[:, :-1] + leaves_y[1:] + returns_y[:-1]
        east, west = -returns_x[:, 1:], -leaves_x[:, :-1]
        north, south = -returns_y[1:], -leaves_y[:-1]
        east[:, -1] = west[:, 0] = 0
        bands = centre.ravel(), east.ravel()[:-1], west.ravel()[1:], north.ravel()[:-n], south.ravel()[n:]
        return sparse.diags(bands, (0, 1, -1, n, -n), format="csc")

    def _exchange(self, diffusivity, speed, shape):
        """Flux through each face for u = 1: (from the point below or left of it, back from the point beyond it)."""
        peclet = np.broadcast_to(speed, shape) * (self.spacing / diffusivity)
        scale = diffusivity / self.spacing**2
        return scale / exprel(-peclet), scale / exprel(peclet)

    def solve(self, diffusivity: float, wind, release) -> np.ndarray:
        """The field of release(x, y)."""
        f = np.broadcast_to(release(self.nodes[None, :], self.nodes[:, None]), (self.points, self.points))
        lu = splu(
            self.operator(diffusivity, wind),
            permc_spec="MMD_AT_PLUS_A",
            diag_pivot_thresh=0.0,
            options={"SymmetricMode": True},
        )
        return lu.solve(f.ravel()).reshape(f.shape)


class Plume:
    """Field of parameters, solved on a mesh `refine` times finer than its n x n points."""

    def __init__(self, points: int = 32, refine: int = 2):
        self.refine, self.mesh = refine, AdvectionDiffusion((points + 1) * refine - 1)

    def field(self, parameters) -> np.ndarray:
        """n x n values for one set of PARAMETERS, in their own units."""
        log_diffusivity, wind_x, wind_y, swirl, source_x, source_y, width = map(float, parameters)

        def wind(x, y):
            return wind_x - 2 * swirl * (y - 0.5), wind_y + 2 * swirl * (x - 0.5)

        def release(x, y):
            distance = (x - source_x) ** 2 + (y - source_y) ** 2
            return np.exp(-distance / (2 * width**2)) / (2 * np.pi * width**2)

        kept = slice(self.refine - 1, None, self.refine)
        return self.mesh.solve(10**log_diffusivity, wind, release)[kept, kept]


def in_units(x) -> np.ndarray:
    """The parameters in their own units, from x (samples, parameters) in [-1, 1]."""
    low, high = np.array([ends for _, *ends in PARAMETERS]).T
    return low + (np.asarray(x, float) + 1) / 2 * (high - low)
