"""Frozen, validated data that the verbs pass to one another: Profile, Cluster, Plan, Report."""

from .cluster import Cluster, Device, Link, MeshAxis
from .plan import BatchEntry, ModelRef, OpPlan, ParamPlan, Plan, Predicted, SolverInfo
from .profile import MemoryPoint, ModuleCost, Profile
from .record import Artifact, Record, Refusal, UserError
from .report import Report

__all__ = [
    "Artifact",
    "BatchEntry",
    "Cluster",
    "Device",
    "Link",
    "MemoryPoint",
    "MeshAxis",
    "ModelRef",
    "ModuleCost",
    "OpPlan",
    "ParamPlan",
    "Plan",
    "Predicted",
    "Profile",
    "Record",
    "Refusal",
    "Report",
    "SolverInfo",
    "UserError",
]
