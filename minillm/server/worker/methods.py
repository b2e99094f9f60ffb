"""Answer HEAD and OPTIONS for every path (RFC 9110, section 9).  Lesson 99."""

from collections.abc import Sequence

from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send


class Methods:
    """Wraps an application: HEAD is GET, whose body the HTTP server leaves out, and OPTIONS lists a path's methods."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]):
        self.app, self.routes = app, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if scope["type"] == "http":
            if scope["method"] == "HEAD":
                scope = {**scope, "method": "GET"}  # a copy: the HTTP server still has to know
            elif scope["method"] == "OPTIONS" and (allow := allowed(self.routes, scope["path"])):
                app = Response(status_code=204, headers={"allow": allow})
        await app(scope, receive, send)


def allowed(routes: Sequence[BaseRoute], path: str) -> str:
    """Return the methods of a path, as the header `allow` lists them; none for a path that no route has."""
    candidates = [route for route in routes if isinstance(route, Route)]
    if path != "*":  # the server as a whole
        first = next((route for route in candidates if route.path_regex.match(path)), None)
        candidates = [route for route in candidates if first is not None and route.path == first.path]
    methods = {method for route in candidates for method in route.methods or ()}
    if "GET" in methods:
        methods.add("HEAD")
    return ", ".join(sorted(methods | {"OPTIONS"})) if methods else ""
