"""Which addresses of a Ray cluster a run can be driven from."""

from __future__ import annotations

from megagrpo.errors import Problem


def address_problem(address: str, where: str) -> Problem | None:
    """Why an address of another kind of Ray's, such as of a server for clients or for jobs, is of no use."""
    scheme, found, rest = address.partition("://")
    if not found:
        return None
    host = rest.partition("/")[0].rpartition(":")[0] or "HOST"
    return Problem(
        where,
        given=f"{scheme}://, from where a run can be started but not driven",
        needed="auto or HOST:PORT, on a node of the cluster: training ranks and engines meet at the driver, and "
        "it shares directories with them",
        fix=f"on any machine: ray job submit --address http://{host}:8265 -- megagrpo train RECIPE",
    )
