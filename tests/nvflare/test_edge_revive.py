"""FedRevive on devices: statistics go up for each device by itself, and the server makes images by them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("nvflare")

from edge_desk import SMALL, Played

from fednorm.core.state import digest
from fednorm.nvflare.edge.cifar10 import Cifar10FedAvg, Cifar10FedRevive

pytestmark = pytest.mark.nvflare

QUICK = "lr=0.3,freeze=1,warmup=2,teachers=2,batch=8,width=8,latent=16,pool=64,kd_batch=4,kd_steps=1"
EMBEDDED = {**SMALL, "data.name": "fashion_mnist_small", "data.train_limit": 120}
EMBEDDED |= {"data.partition": "shards"}


def test_reviving_needs_what_every_device_reports_and_nobody_averages_it(tmp_path: Path) -> None:
    method = Cifar10FedRevive.method.replace("statistics=bn", f"statistics=bn,{QUICK}")
    config = Cifar10FedRevive.config(devices=3, **{**EMBEDDED, "method": method})
    played = Played(tmp_path, devices=3, config=config, num_versions=5)
    initial = {key: value.clone() for key, value in played.recipe.setup.network().state_dict().items()}
    played.play()
    server = played.desk.course.arrivals
    assert server is not None
    assert [row["clients"] for row in played.rows] == [1] * 5
    assert max(max(row["staleness"]) for row in played.rows) > 0
    assert server.reviser is not None
    assert server.reviser.memory.tree  # teachers, generator and images
    told = server.reported
    assert sorted(told) == sorted({client for row in played.rows for client in row["cohort"]})
    assert len({digest(tree) for tree in told.values()}) == len(told)
    for key in next(iter(told.values())):
        assert played.desk.tree[key].equal(initial[key].to(played.desk.tree[key].dtype)), key


def test_ready_devices_have_the_published_setting() -> None:
    config = Cifar10FedRevive.config(devices=100, dir="data")
    assert (config.data.name, config.data.clients, config.data.dir) == ("cifar10", 100, "data")
    assert (config.model, config.train.optimizer, config.train.lr) == ("resnet18", "adam", 3e-4)
    assert (config.train.local_steps, config.train.batch_size) == (25, 32)
    assert config.method == "fedrevive(statistics=bn)+fedbn(report=true)"
    assert Cifar10FedAvg.config(devices=10).method == "fedbn"


def test_the_ready_processor_is_what_a_leaf_runs(tmp_path: Path) -> None:
    config = Cifar10FedAvg.config(devices=2, **EMBEDDED)
    played = Played(tmp_path, devices=2, config=config, num_versions=1, processor=Cifar10FedAvg)
    played.play()
    assert len(played.kept(1)) == 10
