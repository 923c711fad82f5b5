"""A link between two network namespaces that delays and drops packets, and can be cut.

    python -m tests.distribution.lossy_wire NAMESPACE NAMESPACE DELAY_SECONDS LOSS SEED

Each namespace gets a device `wire`, with the addresses 10.77.0.1 and 10.77.0.2. A line `cut` or
`mend` on standard input controls the link; the program exits at the end of its input. Unlike
`tc netem`, it needs only TUN devices.
"""

import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import subprocess
import sys
import time

ADDRESSES = ("10.77.0.1", "10.77.0.2")
_NEW_NETWORK, _SET_DEVICE, _TUN, _NO_HEADER = 0x40000000, 0x400454CA, 0x0001, 0x1000


def open_end(namespace: str, address: str) -> int:
    """Creates the device in the namespace; reading the descriptor returns the packets it sent."""
    library = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if library.setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _SET_DEVICE, struct.pack("16sH22x", b"wire", _TUN | _NO_HEADER))
    for command in (
        ["addr", "add", f"{address}/24", "dev", "wire"],
        ["link", "set", "wire", "up"],
        ["link", "set", "lo", "up"],
    ):
        subprocess.run(["ip", *command], check=True)
    return end


def main(namespaces: list[str], delay: float, loss: float, seed: int) -> None:
    ends = [open_end(name, address) for name, address in zip(namespaces, ADDRESSES, strict=True)]
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    chance, count = random.Random(seed), itertools.count()
    under_way: list[tuple[float, int, int, bytes]] = []
    is_cut = False
    print("ready", flush=True)
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        ready, _, _ = select.select([*ends, sys.stdin], [], [], wait)
        if sys.stdin in ready:
            line = sys.stdin.readline()
            if not line:
                return
            is_cut = line.strip() == "cut"
        for end in ready:
            if end in other:
                packet = os.read(end, 65536)
                if not is_cut and chance.random() >= loss:
                    at = time.monotonic() + delay
                    heapq.heappush(under_way, (at, next(count), other[end], packet))
        while under_way and under_way[0][0] <= time.monotonic():
            *_, end, packet = heapq.heappop(under_way)
            if not is_cut:
                os.write(end, packet)


if __name__ == "__main__":
    main(sys.argv[1:3], float(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
