"""What a pod is told when it starts: the content of `boot.json` in the job's boot ConfigMap.

The operator writes it for pods and `foremoe run` writes the same file for local processes, so that the agent has one
input whatever started it. What differs between the pods of a job (role, index) comes by environment.
"""

from __future__ import annotations

from pydantic import Field

from foremoe_operator.api.base import ApiModel
from foremoe_operator.api.constants import PORT_AGENT, PORT_RAY_DASHBOARD, PORT_RAY_GCS
from foremoe_operator.api.job import ForeMoEJobSpec


class BootConfig(ApiModel):
    """Identity of the job and attempt, where its head is, and the job's spec as it was applied."""

    job: str = Field(description="Name of the job.")
    namespace: str = Field(description="Namespace of the job; 'local' for processes of `foremoe run`.")
    attempt: int = Field(1, ge=1, description="Number of this set of pods.")
    head_host: str = Field(description="DNS name or address of the head.")
    ray_port: int = Field(PORT_RAY_GCS, description="Port of Ray's GCS on the head.")
    dashboard_port: int = Field(PORT_RAY_DASHBOARD, description="Port of Ray's dashboard on the head.")
    agent_port: int = Field(PORT_AGENT, description="Port of the agent's HTTP server on the head.")
    spec: ForeMoEJobSpec = Field(description="The job's spec.")
