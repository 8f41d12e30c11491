"""The network interface that ranks and engines use between nodes: the one by which Ray knows the node."""

from __future__ import annotations

import os

import psutil

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def use_interface_of(address: str) -> None:
    """For the process groups of this process and of those it starts. What the user has set stays.

    Left alone, gloo takes the address that the host name resolves to, which on many machines is 127.0.1.1, and NCCL
    the first interface that it finds. An address that no interface has (an alias of loopback) changes nothing.
    """
    if name := interface_of(address):
        for variable in VARIABLES:
            os.environ.setdefault(variable, name)


def interface_of(address: str) -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return name
    return None
