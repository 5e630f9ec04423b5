"""What was seen of the way to another machine, as findings. Pure."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence

from rallypoint.base.text import listed, many, plural
from rallypoint.preflight.rules import Finding

__all__ = [
    "ENOUGH_BYTES", "MOST_OFF_S", "USUAL_SIZES", "half_open_peers", "judge_answer", "judge_back", "judge_name", "judge_offset",
    "judge_packets", "judge_port", "judge_rate", "judge_resolution", "judge_route", "judge_trip", "largest_that_fits", "table",
]  # fmt: skip

ENOUGH_BYTES = 512 * 1024  # more than fits into the buffers on the way: if less has gone through, large packets are lost
STUCK_S = 2.0  # a way on which nothing moves for so long is not merely slow
USUAL_SIZES = (576, 1000, 1280, 1400, 1420, 1450, 1460, 1480, 1492, 1500, 8900, 9000)  # of packets, by tunnel or interface
_LEAST_MTU = 1280
_ANSWERED = "03"  # SYN_RECV
_LONG_TRIP_S = 0.2
MOST_OFF_S = 5.0


def judge_name(name: str, addresses: Sequence[str], error: str = "") -> Finding:
    """Whether others could find this machine by the name that it has for itself."""
    if error:
        advice = "no harm with c10d: addresses are told; otherwise put it into DNS or /etc/hosts, or give --local-addr"
        return Finding("name", "unknown", f"{name} does not resolve here: {error}", advice)
    if all(address.startswith("127.") or address == "::1" for address in addresses):
        advice = "do not use this name as an endpoint: name an address, or take the line out of /etc/hosts"
        return Finding("name", "unknown", f"{name} is {listed(addresses)}, which no other machine can reach", advice)
    return Finding("name", "ok", f"{name} is {listed(addresses)}")


def judge_resolution(host: str, addresses: Sequence[str], took_s: float, error: str = "") -> Finding:
    if error:
        return Finding("resolve", "bad", f"{host}: {error}", "check the spelling, DNS and /etc/hosts; an address will do as well")
    advice = "a name server does not answer: see /etc/resolv.conf" if took_s > 1 else ""
    return Finding("resolve", "ok", f"{host} is {listed(addresses)} ({took_s * 1000:.0f} ms)", advice)


def judge_port(address: str, error: str, is_here: bool) -> Finding:
    """What came of dialling it; `is_here` says that the address is this machine's."""
    if not error:
        return Finding("port", "ok", f"{address} is reachable")
    if is_here and "refused" in error.lower():
        return Finding("port", "ok", f"{address} is this machine's, and free: a job could have its store here")
    if "refused" in error.lower():
        advice = "nothing listens there yet: start the job's host first; or run `rallypoint doctor --listen PORT` there"
    elif "timed out" in error.lower():
        advice = (
            "packets are dropped, there or on the way back: a firewall, a security group, an asymmetric route or a wrong address;"
            " `rallypoint doctor --listen PORT` there tells if ours arrive"
        )
    else:
        advice = "there is no way there: see `ip route get ADDRESS`"
    return Finding("port", "bad", f"{address}: {error}", advice)


def judge_answer(kind: str, told: str) -> Finding:
    match kind:
        case "store":
            return Finding("answers", "ok", f"a coordination store of rallypoint: {told}")
        case "doctor":
            return Finding("answers", "ok", "another `rallypoint doctor --listen`")
        case "etcd":
            return Finding("answers", "ok", f"etcd {told}", "use it with --rdzv-backend etcd")
        case "http":
            advice = "the port belongs to another service: use another one"
            return Finding("answers", "bad", f"an HTTP server: {told}", advice)
    advice = (
        "the port may belong to another service, such as torch's TCPStore (MASTER_PORT), or to a firewall that accepts everything"
    )
    return Finding("answers", "bad", told or "something accepts connections and says nothing", advice)


def judge_route(source: str, path_mtu: int | None) -> Finding:
    what = f"from {source}" + (f", packets of up to {path_mtu} bytes" if path_mtu else "")
    if path_mtu is not None and path_mtu < _LEAST_MTU:
        return Finding("route", "bad", what, f"fewer than {_LEAST_MTU} bytes: see `ip link` and the tunnel on the way")
    return Finding("route", "ok", what)


def judge_trip(trips_s: Sequence[float], lost: int) -> Finding:
    if not trips_s:
        return Finding("round trip", "bad", f"{many(lost, 'try', 'tries')}, no answer", "the connection is unstable")
    what = f"{min(trips_s) * 1000:.2f} ms at best, {max(trips_s) * 1000:.2f} ms at worst, of {many(len(trips_s), 'connection')}"
    if lost:
        return Finding("round trip", "bad", f"{what}; {lost} {plural(lost, 'was', 'were')} lost", "the connection is unstable")
    advice = "far away: think of keep_alive_interval and the lease" if min(trips_s) > _LONG_TRIP_S else ""
    return Finding("round trip", "ok", what, advice)


def judge_offset(off_s: float, within_s: float) -> Finding:
    """By how much our clock is ahead of theirs. It harms no job; it does whoever compares two hosts' logs."""
    what = f"{abs(off_s):.3f} s {'ahead of' if off_s > 0 else 'behind'} theirs, within {within_s:.3f} s"
    if abs(off_s) - within_s <= MOST_OFF_S:
        return Finding("clocks", "ok", what)
    return Finding("clocks", "unknown", what, "rallypoint compares no clocks; for logs and certificates see `chronyc tracking`")


def judge_rate(direction: str, moved: int, took_s: float, is_complete: bool, silent_s: float = float("inf")) -> Finding:
    """Of so many bytes that arrived, the last of them so long ago."""
    if not is_complete and moved < ENOUGH_BYTES and silent_s >= STUCK_S:
        advice = "small packets arrive and large ones do not: lower the MTU, or let ICMP 'fragmentation needed' through"
        return Finding(direction, "bad", f"{moved} bytes arrived in {took_s:.0f} s, then nothing", advice)
    rate = moved / max(took_s, 1e-6) / 1e6
    return Finding(direction, "ok", f"{rate:.0f} MB/s" if rate >= 10 else f"{rate:.2f} MB/s")


def largest_that_fits(arrive: Callable[[int], bool], usual: int | None) -> int | None:
    """The largest of the usual sizes below `usual` at which packets still arrive; None: not even the smallest."""
    sizes = [size for size in USUAL_SIZES if usual is None or size < usual]
    low, high = -1, len(sizes)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if arrive(sizes[middle]) else (low, middle)
    return sizes[low] if low >= 0 else None


def judge_packets(stuck: Sequence[str], usual: int | None, largest: int | None) -> Finding:
    """What size of packets gets through; `stuck` are the directions in which those of the usual size do not."""
    where = f" of {usual} bytes" if usual else " of the usual size"
    if not stuck:
        return Finding("packets", "ok", f"up to {largest} bytes on the way, as a router says; {usual} at this interface")
    ways = listed(stuck)
    if largest is None:
        advice = "it is no matter of the MTU: something on the way lets connections begin and nothing else; ask who runs it"
        return Finding("packets", "bad", f"not even small ones arrive once a connection carries data ({ways})", advice)
    advice = (
        f"give both interfaces that MTU (`ip link set DEVICE mtu {largest}`), or let ICMP 'fragmentation needed' through;"
        " `sysctl net.ipv4.tcp_mtu_probing=1` helps TCP alone"
    )
    return Finding("packets", "bad", f"up to {largest} bytes arrive, those{where} do not ({ways})", advice)


def half_open_peers(table: str, port: int) -> Iterable[bytes]:
    """From the kernel's table of connections: the addresses of those who tried to connect to this port, whom it has answered, and
    who have not answered that.
    """
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 3 and fields[3] == _ANSWERED and int(fields[1].rpartition(":")[2], 16) == port:
            words = bytes.fromhex(fields[2].partition(":")[0])
            yield struct.pack(f"={len(words) // 4}I", *struct.unpack(f">{len(words) // 4}I", words))


def judge_back(error: str) -> Finding:
    """Whether they can reach us on a port that they were not asked from."""
    if not error:
        return Finding("way back", "ok", "they can connect to this machine, too")
    advice = "connections go one way only: workers connect both ways, so open this machine's ports to the others"
    return Finding("way back", "bad", f"they cannot connect to this machine: {error}", advice)


def table(findings: Sequence[Finding]) -> str:
    """One line for each, and what to do below it."""
    marks = {"ok": "ok", "bad": "BAD", "unknown": "?"}
    width = max((len(one.check) for one in findings), default=0)
    lines = []
    for one in findings:
        lines.append(f"{marks[one.state]:<4} {one.check:<{width}}  {one.what}")
        if one.advice:
            lines.append(f"     {'':<{width}}  -> {one.advice}")
    return "\n".join(lines)
