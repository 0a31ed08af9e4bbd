"""Everything that knows veRL: the modules it loads by name and the classes they register.

veRL imports `foremoe.verl.plugin` in every process (VERL_USE_EXTERNAL_MODULES) and `foremoe.verl.engine` in the
processes that hold a model (actor_rollout_ref.model.external_lib). Nothing else of this project imports this package.
No file of veRL is changed; what is replaced at run time is listed in `docs/verl-integration.md`.
"""
