"""The network interface of the processes of a run: loopback on one machine, that of the node on a cluster."""

from __future__ import annotations

import os

ADDRESS = "127.0.0.1"
"""Where servers of a run listen."""
NODE_ADDRESS = "DATAFLOW_NODE_ADDRESS"
"""The environment variable with the address of the node that a service's process is on."""


RAY_ON_LOOPBACK = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
"""A variable of Ray and the value with which a Ray that this process starts listens on 127.0.0.1 alone."""


def ray_stays_on_loopback() -> None:
    """Sets that variable, which Ray reads when it is imported: by the run, or before by verl or a file of the user.

    It is the default on macOS and Windows, for which Ray documents it. Without it, Ray takes the address of a network
    interface for 127.0.0.1, and listens on all of them. A process can join other clusters either way.
    """
    os.environ.setdefault(*RAY_ON_LOOPBACK)


def stay_on(address: str) -> None:
    """Makes gloo and NCCL use the interface that has an address, unless the user has chosen one.

    Without a choice gloo takes the interface of the machine's name, which is loopback on many systems: ranks on other
    machines then cannot connect; or, of ranks on one machine, one that listens to the network.
    """
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
            return
