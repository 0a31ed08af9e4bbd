"""What the operator decides, as pure functions: no clock, no network, no Kubernetes client, no kopf."""
