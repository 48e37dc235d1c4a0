"""Groups of parameters by patterns of names, in Python and in a configuration, also in pipelines."""

import json
import tomllib
from functools import partial

import h5py
import numpy as np
import pytest
from loops import looped

from pmm3d import CheckpointError, Grid, Pmm3dError, nn
from pmm3d.nn import optim
from pmm3d.nn.training import build
from pmm3d.nn.training.config import checked
from pmm3d.nn.training.described import as_toml
from pmm3d.nn.training.network import Own, make_optimizer

pytestmark = pytest.mark.deadline(240)
GROUPS = """
[data]
file = "x.h5"

[[optimizer.groups]]
match = "*.bias"
lr = 0.5
betas = [0.5, 0.75]

[[optimizer.groups]]
match = "2.*"
lr = 0.25
weight_decay = 0.125
"""


def configured(groups, **optimizer):
    return checked({"data": {"file": "x.h5"}, "optimizer": {**optimizer, "groups": groups}})


def named_options(config, network, *options):
    """Name -> values of these options of its group."""
    optimizer = make_optimizer(config, network, Own.of(config, network.parent_grid))
    group_of = {parameter: group for group in optimizer.groups for parameter in group["params"]}
    named = network.named_parameters()
    assert len(group_of) == len(named)
    return {name: tuple(group_of[each][option] for option in options) for name, each in named.items()}


def test_the_first_pattern_that_matches_gives_the_options():
    config = checked(tomllib.loads(GROUPS))
    assert checked(tomllib.loads(as_toml(config))) == config == checked(json.loads(json.dumps(config.settings())))
    with Grid.dry((1, 1, 1)) as grid:
        net = nn.MLP(grid, [4, 8, 8, 2])
        assert named_options(config, net, "lr", "weight_decay", "decay_vectors", "betas") == {
            "0.weight": (0.001, 0.0, False, [0.9, 0.999]),
            "0.bias": (0.5, 0.0, False, [0.5, 0.75]),
            "2.weight": (0.25, 0.125, True, [0.9, 0.999]),
            "2.bias": (0.5, 0.0, False, [0.5, 0.75]),
            "4.weight": (0.001, 0.0, False, [0.9, 0.999]),
            "4.bias": (0.5, 0.0, False, [0.5, 0.75]),
        }
        for wrong in (["*.bias"], {"match": "*.bias"}, [{"match": 3}]):
            with pytest.raises(Pmm3dError, match='a group by name has "match"'):
                optim.groups_by_name(net, wrong)
        with pytest.raises(Pmm3dError, match=r'in the group match = "2.\*": near names are 0.'):
            optim.groups_by_name(net, [{"match": "2.*"}], net.layers[0].parameters())
        optimizer = make_optimizer(config, net, Own.of(config, grid))
        optim.Schedule(optimizer, warm_up=2)
        assert optimizer.lr == 0.0005 and {group["lr"] for group in optimizer.groups} == {0.0005, 0.25, 0.125}


@looped(
    "groups, text",
    [
        ([{"match": "*.bais"}], r'match = "\*.bais": near names are (0|2).bias'),
        ([{"match": "0.*"}, {"match": "0.bias"}], 'match = "0.bias": all of its parameters match an earlier pattern'),
        ([{"lr": 0.1}], 'a group by name has "match", a pattern'),
        ([{"match": "*", "params": []}], 'and no "params"'),
        ([{"match": "*", "rate": 0.1}], r"AdamW, in a group of parameters: unknown option rate"),
        ([{"match": "*", "momentum": 0.1}], r"unknown option momentum"),
        ([{"match": "*", "lr": "fast"}], "AdamW: lr = 'fast': needed is a number of at least 0"),
        ([{"match": "*", "betas": [1, 2]}], "betas = .*: needed is a list of 2"),
    ],
)
def test_groups_that_do_not_fit_are_refused(groups, text):
    config = configured(groups)
    with Grid.dry((1, 1, 1)) as grid, pytest.raises(Pmm3dError, match=text):
        make_optimizer(config, nn.MLP(grid, [4, 8, 2]), Own.of(config, grid))


@looped("groups", [3, [3], {"match": "*"}])
def test_groups_are_a_list_of_tables(groups):
    with pytest.raises(Pmm3dError, match=r"optimizer.groups = .*: needed is tables, such as \[\{match = "):
        configured(groups)


@pytest.mark.parallel([2])
@looped("kind", ["muon", "sgd"])
def test_a_pipeline_has_the_groups_of_the_whole_network(comm, kind):
    """Stages lack the parameters of some groups. Muon spares what it spares without groups."""
    patterns = [{"match": "*.bias", "weight_decay": 0.5}, {"match": "1.*", "momentum": 0.5}]
    config = configured(patterns, kind=kind, momentum=0.0 if kind == "sgd" else 0.75)
    make = partial(nn.GPT, vocabulary=8, layers=2, hidden=8, heads=2, positions=4)
    options = "weight_decay", "momentum", "decay_vectors", *(["use_muon"] * (kind == "muon"))
    with Grid.dry((1, 1, 1)) as dry, Grid(comm, (1, 1, 1), axes={"pipe": 2}) as grid:
        wanted, pipeline = named_options(config, make(dry), *options), nn.Pipeline(grid, make)
        found = named_options(config, pipeline, *options)
        assert len({*wanted.values()}) >= 3 and wanted["1.attention.qkv.weight"][1] == 0.5
        assert found == {name: wanted[name] for name in found}
        assert set().union(*comm.allgather({*found})) == {*wanted}
        optimizer = make_optimizer(config, pipeline, Own.of(config, grid))
        assert len({*comm.allgather(str((optimizer.state_names, len(optimizer.groups))))}) == 1


@pytest.mark.parallel([2])
def test_a_run_trains_its_groups_and_resumes(comm, shared_path):
    if comm.rank == 0:
        with h5py.File(shared_path / "x.h5", "w") as file:
            file["x"] = np.random.default_rng(0).standard_normal((60, 6)).astype("float32")
            file["y"] = np.arange(60) % 3
    comm.barrier()
    groups = [{"match": "0.*", "lr": 0.0}, {"match": "*.bias", "momentum": 0.5}]

    def run(epochs, groups=groups, **grid):
        config = checked(
            {
                "data": {"file": str(shared_path / "x.h5"), "batch_size": 20, "validation": 0.0},
                "training": {"folder": str(shared_path / "run"), "epochs": epochs},
                "network": {"hidden": [8]},
                "optimizer": {"kind": "sm3", "groups": groups},
                "schedule": {"kind": "wsd"},
                "grid": grid,
            }
        )
        with build.trainer(config, comm) as trainer:
            before = {name: trainer.state.network.gather(name) for name in trainer.state.network.named_parameters()}
            assert trainer.resume() == (epochs == 2) and trainer.run()
            meta = trainer.checkpoints.meta(trainer.checkpoints.latest())
            assert meta["settings"]["optimizer"]["groups"] == groups
            after = {name: trainer.state.network.gather(name) for name in before}
        return {name for name, value in after.items() if not np.array_equal(value, before[name])}, after

    changed, first = run(1)
    assert changed == {"2.weight", "2.bias"}
    with pytest.raises(
        CheckpointError, match="of an optimizer with other states.* with the groups and options of the optimizer"
    ):
        run(2, [{"match": "2.weight", "momentum": 0.5}])
    changed, second = run(2, [groups[0], {"match": "*.bias", "momentum": 0.25}], shape="megatron")
    assert changed == {"2.weight", "2.bias"} and not np.array_equal(first["2.weight"], second["2.weight"])
