"""The only package that talks to the API server and to the agents: reading, writing, and the loop around the core."""
