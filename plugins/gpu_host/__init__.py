"""Airflow's side of the GPU host: everything that talks SSH, all of it safe to repeat.

Imports airflow, its SSH provider, and the light modules of :mod:`drafter`; never a phase.
"""
