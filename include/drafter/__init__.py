"""Turn a served reasoning model into an EAGLE-3 drafter for it, one phase at a time.

Runs on the GPU host as ``python -m drafter``. Phases never import each other: they meet on disk, in
the files that :mod:`drafter.layout` specifies. Nothing here imports airflow.
"""
