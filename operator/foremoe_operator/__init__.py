"""ForeMoE operator: runs ForeMoEJob objects as Ray head and worker pods that train with veRL.

`api` holds the custom resources and every name other programs rely on; `core` decides (pure functions); `kube` talks
to the API server; `handlers` are the kopf registrations.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("foremoe")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"
