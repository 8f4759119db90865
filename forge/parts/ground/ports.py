"""Who listens on which loopback port of this computer, by the process table. Starts nothing."""

from __future__ import annotations


def listener_pids(port: int) -> list[int]:
    """The pids of this user's processes that listen on `port`; 0 stands for one we cannot see."""
    import psutil

    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return []
    return [
        c.pid or 0
        for c in connections
        if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port
    ]


def listening_ports(pid: int) -> set[int]:
    """The ports on which process `pid` or a child of it listens. Needs no privilege."""
    import psutil

    ports: set[int] = set()
    try:
        leader = psutil.Process(pid)
        for process in [leader, *leader.children(recursive=True)]:
            for connection in process.net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    ports.add(int(connection.laddr.port))
    except (psutil.Error, OSError):
        return ports
    return ports


def listener_name(port: int) -> str:
    """Who listens on `port`, for people."""
    import psutil

    for pid in listener_pids(port):
        try:
            return f"{psutil.Process(pid).name()} (pid {pid})" if pid else "another user's program"
        except psutil.Error:
            continue
    return "another program"
