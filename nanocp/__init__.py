"""NanoCP: `nanocp.Client` and `nanocp.AsyncClient`, and the words that its programs share.

The clients are nanocp.client's. They are imported on first use, because the scheduler imports this
package without gRPC.
"""

TYPE_CHECKING = False  # Type checkers know the name; typing's own would be an import.
if TYPE_CHECKING:
    from nanocp.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'nanocp' has no attribute {name!r}")
    import nanocp.client

    return getattr(nanocp.client, name)
