"""A real Kubernetes cluster on the machine this runs on, without Docker and without an image registry.

For development, tests and the demo. The control plane and the DNS server are ordinary processes of
the host; each node is a process tree in its own network, mount, PID, UTS and IPC namespace with
containerd, kubelet and kube-proxy in it. `settings` holds every fixed name and address, `lifecycle`
the order of things, `leftovers` what any earlier run may have left. Names are fixed and found on
the system, never remembered by a checkout: one cluster per machine, whoever started it.
"""
