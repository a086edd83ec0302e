"""Two hosts on one machine: namespaces of network, IPC, processes and host name for each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shared_offload.config import Settings
from shared_offload.pipeline.generate import Pipeline

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).with_name("driver.py")
SHARED = {
    "dit_quantized": True,
    "dit_quant_scheme": "fp8-vllm",
    "cpu_offload": True,
    "shared_cpu_weights": True,
    "shared_cpu_weight_scope": "host",
    "size": [48, 80],
}
LIMIT = 20.0  # a host that only falls silent is given 12 s


def sh(command: str) -> None:
    subprocess.run(command, shell=True, check=True, capture_output=True, timeout=20)


class Hosts:
    """Two network namespaces joined by a cable, and a torchrun with two ranks on each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = [f"so{os.getpid()}{end}" for end in "ab"]
        self.launchers: list[subprocess.Popen] = []

    def build(self) -> None:
        for name in self.names:
            sh(f"ip netns add {name}")
        a, b = self.names
        sh(f"ip link add eth0 netns {a} type veth peer name eth0 netns {b}")
        for number, name in enumerate(self.names, 1):
            sh(f"ip -n {name} addr add 10.77.0.{number}/24 dev eth0")
            sh(f"ip -n {name} link set eth0 up && ip -n {name} link set lo up")

    def start(self, job: dict[str, Any]) -> None:
        names = ["127.0.0.1 localhost", "10.77.0.1 host0", "10.77.0.2 host1", ""]
        (self.folder / "hosts").write_text("\n".join(names))
        path = self.folder / "job.json"
        path.write_text(json.dumps({**job, "folder": str(self.folder)}))
        for number, name in enumerate(self.names):
            apart = ["unshare", "--ipc", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
            inside = f"hostname host{number} && mount --bind hosts /etc/hosts && "
            inside += f"exec {sys.executable} -m torch.distributed.run"
            words = ["--nnodes=2", "--nproc_per_node=2", "--rdzv_id=run"]
            words += ["--rdzv_backend=c10d", "--rdzv_endpoint=10.77.0.1:29400"]
            words += [f"--local_addr=10.77.0.{number + 1}", str(DRIVER), str(path)]
            command = ["ip", "netns", "exec", name, *apart, "sh", "-c", f'{inside} "$@"', "sh"]
            environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
            environment |= {"GLOO_SOCKET_IFNAME": "eth0"}
            with (self.folder / f"stderr{number}").open("w") as stderr:
                process = subprocess.Popen(
                    [*command, *words], env=environment, stderr=stderr, cwd=self.folder
                )
            self.launchers.append(process)

    def stderr(self) -> str:
        return "".join((self.folder / f"stderr{n}").read_text() for n in range(2))

    def end(self, seconds: float) -> list[int]:
        deadline = time.monotonic() + seconds
        return [p.wait(max(0.1, deadline - time.monotonic())) for p in self.launchers]

    def pull_down(self) -> None:
        for process in self.launchers:
            process.kill()
            process.wait(10)
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path)
    try:
        try:
            made.build()
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield made
    finally:
        made.pull_down()


@pytest.mark.slow
def test_two_hosts_have_an_arena_each_and_one_result(hosts, settings) -> None:
    hosts.start({"kind": "videos", "settings": {"v": settings(**SHARED)}})
    assert hosts.end(120) == [0, 0], hosts.stderr()
    made = [torch.load(hosts.folder / f"made{rank}.pt") for rank in range(4)]
    latents, _, _, arenas = made[0]["v"]
    assert [list(arena["ranks"]) for arena in arenas] == [[0, 1], [2, 3]]
    assert [arena["hostname"] for arena in arenas] == ["host0", "host1"]
    with Pipeline(Settings.from_json_and_flags(settings(**SHARED), {})) as pipeline:
        alone = pipeline.generate().latents
    for other in made:
        assert torch.equal(other["v"][0], latents)
    assert (latents - alone).abs().max() < 0.02 * alone.abs().max()


@pytest.mark.slow
def test_a_kill_on_one_host_ends_both(hosts, settings) -> None:
    who = 2  # on the host that does not have the store
    config = hosts.folder / "config.json"
    config.write_text(json.dumps(settings(**SHARED, parallel={"seq_p_size": 4})))
    argv = ["--config_json", str(config), "--save_result_path", str(hosts.folder / "v.mp4")]
    fault = {"fault": "kill", "stage": "denoise", "who": who}
    hosts.start({"kind": "command", "argv": argv, **fault})
    deadline = time.monotonic() + 120
    while not (hosts.folder / "there").exists():
        ended = any(launcher.poll() is not None for launcher in hosts.launchers)
        assert time.monotonic() < deadline and not ended, hosts.stderr()
        time.sleep(0.05)
    assert 0 not in hosts.end(LIMIT), hosts.stderr()
    assert hosts.stderr().count(f"RankError: rank {who} of 4 (pid ") == 1, hosts.stderr()
    assert "on host1) disappeared in stage denoise" in hosts.stderr()
    assert not (hosts.folder / "v.mp4").exists()
