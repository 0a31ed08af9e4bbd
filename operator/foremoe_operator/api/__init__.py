"""The contract: custom resources, what a pod is told at boot, what it reports, and every shared name.

Pure data (pydantic, standard library). Both programs import it: the operator renders from it, the agent in a pod
reads it. `crds/` is generated from these models.
"""
