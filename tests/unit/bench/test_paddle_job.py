"""The inputs of Paddle's job: addresses of the loopback interface, and rows in Paddle's own text format."""

import os

import numpy as np
import pytest

from bench.peers.job import Options
from bench.peers.paddle_job import write_slots
from bench.peers.paddle_server import cpu_s, free_ports, roles


def test_ports_that_are_taken_together_differ():
    assert len(set(free_ports(5))) == 5


def test_server_and_trainer_have_the_same_local_addresses():
    server, trainer = roles(4001, 4002)

    assert (
        server["PADDLE_PSERVERS_IP_PORT_LIST"] == trainer["PADDLE_PSERVERS_IP_PORT_LIST"] == "127.0.0.1:4001"
    )
    assert (server["PADDLE_PORT"], trainer["PADDLE_PORT"]) == ("4001", "4002")
    assert {server["POD_IP"], trainer["POD_IP"]} == {"127.0.0.1"}


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="only Linux has /proc")
def test_the_cpu_time_of_a_process_counts_what_it_has_used():
    assert 0 < cpu_s(os.getpid()) <= sum(os.times()[:2]) + 0.1


def test_no_id_is_0_and_fields_do_not_share_ids(tmp_path):
    np.save(tmp_path / "ids.npy", np.zeros((2, 26), np.uint64))
    np.save(tmp_path / "dense.npy", np.full((2, 13), 0.5, np.float32))
    np.save(tmp_path / "labels.npy", np.array([1, 0], np.float32))
    options = Options(tmp_path, "fp32", batch=2, seconds=1, threads=1, wait=False)

    assert write_slots(options, 10, tmp_path / "slots") == 2
    lines = (tmp_path / "slots").read_text().splitlines()
    ids = " ".join(str(1 + 10 * field) for field in range(26))
    assert lines == [f"26 {ids} 13{' 0.5' * 13} 1 {label}" for label in (1, 0)]
