"""Peers of the comparison: other trainers of the same model on the same data, each in its own environment.

    registry.py   the peers: pinned requirements, jobs
    setup.py      `python -m bench.peers.setup NAME...` makes build/peers/NAME
    job.py        the base of all jobs: options, data, the timed loop, the line of JSON
    running.py    starts a job in its environment and checks its output
    NAME_job.py   a peer's model and step; runs inside build/peers/NAME

Nothing in this package imports freshet: the peers' environments do not have it.

The model is the same for all: 26 tables of dim 16, one id a field, their rows beside 13 numbers (429 wide),
an MLP 512-256-1 with ReLU, binary cross-entropy; rows step by row-wise Adagrad (lr 0.2, summed gradients;
Adagrad per element where a peer has no row-wise one, and its `about` says so), the dense part by Adam (1e-3).
"""
