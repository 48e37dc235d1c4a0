"""Several networks with an optimizer each: a GAN learns as in torch, and continues from one checkpoint on any grid."""

import re
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from loops import given
from networks import INPUT, alone, bits, on_each_grid, ordinary, spread, weights_of
from samples import TESTED
from torch_reference import by_rank_0

from pmm3d import Grid, Pmm3dError, nn
from pmm3d.io import Checkpoints
from pmm3d.layout import batch_layout
from pmm3d.nn import optim
from pmm3d.nn.exchange import load_weights
from pmm3d.nn.recorded_steps import Replays
from pmm3d.nn.training import TrainState, TrainStates
from pmm3d.nn.training.step import train_step

pytestmark = [pytest.mark.parallel([2], thorough=[1, 4]), pytest.mark.deadline(240)]

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
ROWS, STEPS, HALF = 9, 10, 4


class Gan:
    """A generator of rows, and a critic that tells them from real ones (least squares)."""

    def __init__(self, grid, seed=1, library=TESTED, shard=False):
        self.grid, options = grid, {"activation": "tanh", "dtype": "float64", "library": library}
        self.generator = nn.MLP(grid, [3, 8, 5], seed=seed, **options)
        self.critic = nn.MLP(grid, [5, 7, 1], seed=seed + 1, **options)
        self.both = nn.Sequential(grid, self.generator, self.critic)
        self.of_generator = optim.Adam(self.generator.parameters(), lr=1e-2, betas=(0.5, 0.9))
        self.of_critic = optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9, shard_over_data=shard)
        self.schedule = optim.Cosine(self.of_generator, 2 * STEPS)
        self.states = TrainStates(
            generator=TrainState(self.generator, self.of_generator, self.schedule),
            critic=TrainState(self.critic, self.of_critic),
        )

    def batch(self, step):
        noise, real = batch_of(step)
        ones, zeros = (spread(self.grid, np.full((ROWS, 1), value), batch_layout(None)) for value in (1.0, 0.0))
        noise, real = (spread(self.grid, each, INPUT) for each in (noise, real))
        with nn.no_grad(self.grid):
            return noise, real, self.generator(noise).value, ones, zeros

    def by_hand(self, step):
        """Losses of the critic and of the generator. The gradients that the generator's loss gives the critic are
        dropped."""
        noise, real, made, ones, zeros = self.batch(step)
        loss = (nn.mse(self.critic(real), ones) + nn.mse(self.critic(made), zeros)) * 0.5
        loss.backward()
        self.of_critic.step()
        other = nn.mse(self.both(noise), ones)
        other.backward()
        self.of_generator.step()
        self.of_critic.zero_grad()
        self.schedule.step()
        return loss.item(), other.item()

    def by_steps(self, step):
        """The same by `train_step`, with a critic that is frozen while the generator learns."""
        noise, real, made, ones, zeros = self.batch(step)
        loss, _ = train_step(self.critic, self.of_critic, nn.mse, [(real, ones), (made, zeros)])
        self.critic.requires_grad_(False)
        other, _ = train_step(self.both, self.of_generator, nn.mse, [(noise, ones)])
        assert all(each.grad is None for each in self.both.parameters())
        self.critic.requires_grad_()
        self.schedule.step()
        return loss, other

    @property
    def values(self):
        return bits({name: each.gather() for name, each in self.states.matrices().items()})


def batch_of(step):
    random = np.random.default_rng(step)
    return random.standard_normal((ROWS, 3)), random.standard_normal((ROWS, 5)) + 2


def of_torch():
    """Losses of the steps."""
    import torch

    torch.set_num_threads(1)
    with alone() as grid:
        gan = Gan(grid, library="numpy")
        generator, critic = (
            [torch.tensor(each, requires_grad=True) for each in weights_of(net).values()]
            for net in (gan.generator, gan.critic)
        )
    of_generator = torch.optim.Adam(generator, lr=1e-2, betas=(0.5, 0.9))
    of_critic = torch.optim.SGD(critic, lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(of_generator, 2 * STEPS)
    through = lambda net, x: torch.tanh(x @ net[0] + net[1]) @ net[2] + net[3]
    found = []
    for step in range(STEPS):
        noise, real = map(torch.from_numpy, batch_of(step))
        made = through(generator, noise)
        loss = ((through(critic, real) - 1).square().mean() + through(critic, made.detach()).square().mean()) / 2
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        other = (through(critic, made) - 1).square().mean()
        of_generator.zero_grad()
        other.backward()
        of_generator.step()
        schedule.step()
        found.append((loss.item(), other.item()))
    return np.array(found)


def test_a_gan_learns_as_in_torch_and_continues_on_another_grid(comm, shared_path):
    """By hand, and by steps of which the later ones are replayed, although the critic is frozen in between."""
    expected, saved, first = by_rank_0(comm, of_torch), [], []

    def continued(grid):
        gan = Gan(grid, seed=7)
        facts = gan.states.resume(Checkpoints(grid, shared_path / "gan"), saved[0])
        assert facts["note"] == "half" and gan.states.step == 2 * HALF and gan.schedule.count == HALF
        told = [gan.by_hand(step) for step in range(HALF, STEPS)]
        assert np.abs(np.array(told) - expected[HALF:]).max() < 1e-9
        return gan.values

    def check(grid):
        gan, told = Gan(grid), []
        for step in range(STEPS):
            if step == HALF and not saved:
                saved.append(gan.states.save(Checkpoints(grid, shared_path / "gan"), note="half"))
            told.append(gan.by_hand(step))
        assert np.abs(np.array(told) - expected).max() < 1e-9
        again = continued(grid)
        if not first:
            first.append(again)
            assert again == gan.values

        runs = []
        for context in (ordinary(), nullcontext()):
            gan = Gan(grid, shard="gradients")
            with context:
                told = [gan.by_steps(step) for step in range(STEPS)]
            assert np.abs(np.array(told) - expected).max() < 1e-9
            runs.append((told, gan.values))
        assert runs[0] == runs[1]
        assert [Replays.of(net).replayed for net in (gan.critic, gan.both)] == [STEPS - 4, STEPS - 5]

    on_each_grid(comm, check)
    if comm.rank == 0:
        with alone() as grid:
            continued(grid)
    comm.barrier()


def test_other_states_are_refused_before_anything_changes(comm, shared_path):
    with Grid(comm, "ddp") as grid:
        gan, kept = Gan(grid), Checkpoints(grid, shared_path / "gan")
        assert gan.states.resume(kept) is None
        gan.by_hand(0)
        gan.states.save(kept)
        other = Gan(grid, seed=7)
        before = other.values
        sgd = optim.SGD(other.generator.parameters(), lr=0.1)
        generator, critic = other.states.states.values()
        for states, text in (
            (TrainStates(generator=generator, judge=critic), "states generator, critic, and this .*, judge;"),
            (TrainStates(critic=critic), "states generator, critic, and this training has critic;"),
            (TrainStates(generator=TrainState(other.generator, sgd), critic=critic), "^generator: .* is Adam, and"),
            (TrainStates(generator=critic, critic=generator), "^generator: .*optimizer is Adam, and the opt.* is SGD"),
            (critic, "optimizer, random missing"),
        ):
            with given(text=text), pytest.raises(Pmm3dError, match=text):
                states.resume(kept)
            assert other.values == before
        critic.save(Checkpoints(grid, shared_path / "critic"))
        with pytest.raises(Pmm3dError, match="states of no training, .*save with TrainStates.save"):
            other.states.resume(Checkpoints(grid, shared_path / "critic"))
        for states in ({}, {"generator": other.generator}):
            with pytest.raises(Pmm3dError, match="takes a TrainState for each name"):
                TrainStates(**states)
        with pytest.raises(Pmm3dError, match="are identifiers, such as generator; got 'a.b'"):
            TrainStates(**{"a.b": critic})
        with pytest.raises(
            Pmm3dError, match=r"contains several networks: generator, critic\. .*\{\"generator\.\" \+ name"
        ):
            load_weights(other.generator, kept.latest())


def test_the_gan_of_the_page_runs_and_resumes(comm, shared_path):
    [text] = [each for each in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S) if "critic" in each]
    text = text.replace("MPI.COMM_WORLD", "comm").replace('"runs/gan"', repr(str(shared_path / "gan")))
    for steps in (40, 60):
        made = {"comm": comm}
        exec(text.replace("2000", str(steps)) + "    whole = generator.gather('0.weight')\n", made)
        assert made["states"].step == steps
    with Grid(comm, "fsdp") as grid:
        kept, generator = Checkpoints(grid, shared_path / "gan"), nn.MLP(grid, [2, 32, 3])
        assert [path.name for path in kept.candidates()] == ["step-00000060", "step-00000040"]
        own = {"generator." + name: each for name, each in generator.matrices().items()}
        kept.load(kept.latest(), own, partial=True)
        generator.loaded()
        assert np.array_equal(generator.gather("0.weight"), made["whole"])
