"""Vowpal Wabbit's own driver over a file, parsed and learned from in C++; runs in the peer's environment.

    build/peers/vw/bin/python bench/peers/vw_driver.py -d FILE --loss_function logistic ...

The wheel brings no `vw` program. Given `-d` its workspace runs what the program runs: the parser on one
thread, the learner on another. Prints one JSON line: seconds of the driver, samples, and the progressive
loss, each example scored before it is learned from.
"""

from __future__ import annotations

import json
import sys
import time

from vowpalwabbit import Workspace


def main() -> None:
    """Run VW with the arguments of the command line."""
    began = time.perf_counter()
    workspace = Workspace(arg_list=["--quiet", *sys.argv[1:]])
    driver_s = time.perf_counter() - began
    samples = workspace.get_weighted_examples()
    loss = workspace.get_sum_loss() / samples
    workspace.finish()
    print(json.dumps({"driver_s": driver_s, "samples": int(samples), "logloss": loss}))


if __name__ == "__main__":
    main()
