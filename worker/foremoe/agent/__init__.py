"""What runs in every pod of a job, and in every process of `foremoe run`: starts Ray, runs the driver, reports.

Imports neither torch nor ray nor verl: an agent must answer within its first second and cost little memory beside the
training it looks after. It starts them as child processes and names modules of `foremoe.verl` as text.
"""
