"""A port of this machine that leads to a port of a Pod, through the API server, as `kubectl port-forward` does it.

Each connection is a WebSocket of its own with the protocol `v4.channel.k8s.io`: a byte in front of each message says
which channel it is of. Of one port there are two, its data and what went wrong; the first message of each is the port's
number.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from leasedjob.cli.exits import Exit, Failure

if TYPE_CHECKING:
    from leasedjob.cli.cluster import Cluster

PROTOCOL: Final = "v4.channel.k8s.io"
CONNECT_SECONDS: Final = 10.0
AT_ONCE: Final = 32  # connections; a browser has six
_DATA, _ERROR = b"\0", b"\1"
_PIECE: Final = 32_768


@dataclass(frozen=True, slots=True)
class Target:
    """A port of a Pod."""

    namespace: str
    pod: str
    port: int


class Forward:
    """Listens on this machine's loopback until it is closed. Use as a context manager.

    Args:
        target: says which Pod is meant; asked again where the one before can't be reached any more.
        port: 0 for any that is free.

    Raises:
        Failure: the port is taken.
    """

    def __init__(self, cluster: Cluster, target: Callable[[], Target], port: int) -> None:
        self._cluster = cluster
        self._find = target
        self.target = target()
        self.trouble = ""  # why the last connection failed
        self._lock = threading.Lock()
        self._open: set[Any] = set()
        self._places = threading.BoundedSemaphore(AT_ONCE)
        try:
            self._listener = socket.create_server(("127.0.0.1", port), backlog=AT_ONCE)
        except OSError as e:
            raise Failure(Exit.REFUSED, f"port {port} of this machine can't be used: {e.strerror or e}") from e
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="forward", daemon=True)

    def __enter__(self) -> Forward:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            open_now, self._open = self._open, set()
        for one in open_now:
            _shut(one)
        self._thread.join(5)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if not self._places.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._carry, args=(connection,), name="forward", daemon=True).start()

    def _carry(self, local: socket.socket) -> None:
        """One connection, from its beginning to its end."""
        far = None
        try:
            far = self._reach()
            with self._lock:
                self._open |= {local, far}
            back = threading.Thread(target=self._back, args=(far, local), name="forward", daemon=True)
            back.start()
            with contextlib.suppress(OSError):
                while piece := local.recv(_PIECE):
                    far.send_binary(_DATA + piece)
            # The protocol has no half of an end: what is still on its way back goes with it. A browser that has closed
            # its side does not wait for more.
            _shut(far)
            back.join(5)
        except Exception as e:  # whatever a library of WebSockets raises where a connection breaks
            self.trouble = str(e) or type(e).__name__
        finally:
            with self._lock:
                self._open -= {local, far}
            for end in (far, local):
                if end is not None:
                    _shut(end)
            self._places.release()

    def _back(self, far: Any, local: socket.socket) -> None:
        greeted: set[bytes] = set()
        try:
            while (message := far.recv()) != "":
                channel, data = bytes(message[:1]), bytes(message[1:])
                if channel not in greeted:
                    greeted.add(channel)  # the port's number
                    data = data[2:]
                if channel == _DATA:
                    local.sendall(data)
                elif data:
                    self.trouble = data.decode(errors="replace")
                    break
                else:
                    self.trouble = ""
        except Exception as e:
            if type(e).__name__ != "WebSocketConnectionClosedException" and not isinstance(e, OSError):
                self.trouble = str(e) or type(e).__name__
        _shut(local)

    def _reach(self) -> Any:
        """A WebSocket to the Pod; to another one where this one is gone."""
        try:
            return connect(self._cluster, self.target)
        except Failure as failure:
            if failure.exit_code == Exit.NO_ACCESS:
                raise
            self.target = self._find()
            return connect(self._cluster, self.target)


def connect(cluster: Cluster, target: Target) -> Any:
    """A WebSocket to the port.

    Raises:
        Failure: NO_ACCESS, NOT_FOUND, REFUSED or UNREACHABLE.
    """
    import websocket
    from kubernetes.stream import ws_client

    path = f"/api/v1/namespaces/{quote(target.namespace, safe='')}/pods/{quote(target.pod, safe='')}/portforward"
    _, url, headers, *_ = cluster.api.param_serialize(
        "GET", path, query_params=[("ports", target.port)], header_params={}, auth_settings=["BearerToken"]
    )
    settings = cluster.api.configuration
    scheme, _, rest = str(url).partition("://")
    url = f"{'wss' if scheme == 'https' else 'ws'}://{rest}"
    given = {name.lower(): value for name, value in headers.items()} | {"sec-websocket-protocol": PROTOCOL}
    before = websocket.getdefaulttimeout()
    websocket.setdefaulttimeout(CONNECT_SECONDS)
    try:
        far = ws_client.create_websocket(settings, url, given)
    except websocket.WebSocketBadStatusException as e:
        raise _answered(e, target) from e
    except (websocket.WebSocketException, OSError) as e:
        raise Failure(Exit.UNREACHABLE, f"no answer from the API server ({cluster.where}): {e}") from e
    finally:
        websocket.setdefaulttimeout(before)
    far.settimeout(None)
    return far


def _answered(error: Any, target: Target) -> Failure:
    said = ""
    with contextlib.suppress(ValueError, TypeError):
        said = str(json.loads(error.resp_body or b"{}").get("message") or "")
    what = f"Pod {target.namespace}/{target.pod}"
    match error.status_code:
        case 401:
            return Failure(Exit.NO_ACCESS, "not logged in: the API server refuses the credentials")
        case 403:
            needed = "get and create pods/portforward"
            return Failure(Exit.NO_ACCESS, f"no access to {what}: {said or 'forbidden'} (needed: {needed})")
        case 404:
            return Failure(Exit.NOT_FOUND, f"{what} not found")
        case code:
            return Failure(Exit.REFUSED, f"no way to {what}: the API server answers {code} {said}".rstrip())


def _shut(end: Any) -> None:
    """Closes a socket or a WebSocket, also while somebody waits in it."""
    with contextlib.suppress(Exception):
        end.shutdown(socket.SHUT_RDWR) if isinstance(end, socket.socket) else end.sock.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(Exception):
        end.close() if isinstance(end, socket.socket) else end.shutdown()
