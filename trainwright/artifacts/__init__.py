"""Frozen, validated data that the verbs pass to one another: Profile, Cluster, Plan, Report."""

from .cluster import Cluster, Device, Learned, Link, MeshAxis, Overheads, Tier
from .difference import Difference, diff
from .estimator import Estimator
from .explanation import Alternative, BreakEven, ExplainedCut, ExplainedDecision, Explanation
from .fitting import FitOn, Fitting
from .offers import Offer, Offers
from .packages import is_installed, need, needed
from .plan import (
    DEFAULT_IMBALANCE,
    EDITED,
    PIPE,
    STAGED_VERSION,
    BatchEntry,
    ModelRef,
    OffloadPlan,
    OpPlan,
    OptimizerGroup,
    ParamPlan,
    PiecePrediction,
    Pipeline,
    Plan,
    Predicted,
    ShapePlan,
    SolverInfo,
    StagePrediction,
    TierPlan,
)
from .profile import Compiled, Fit, MemoryPoint, ModuleCost, OpCost, Profile, Remedy, SweepPoint
from .record import Artifact, Record, Refusal, UserError, check_range
from .report import Report
from .run import Compared, Run
from .selfcheck import Checked, SelfCheck
from .sizes import parse_bytes, parse_count
from .stream_plan import StreamPlan, StreamPredicted

__all__ = [
    "DEFAULT_IMBALANCE",
    "EDITED",
    "PIPE",
    "STAGED_VERSION",
    "Alternative",
    "Artifact",
    "BatchEntry",
    "BreakEven",
    "Checked",
    "Cluster",
    "Compared",
    "Compiled",
    "Device",
    "Difference",
    "Estimator",
    "ExplainedCut",
    "ExplainedDecision",
    "Explanation",
    "Fit",
    "FitOn",
    "Fitting",
    "Learned",
    "Link",
    "MemoryPoint",
    "MeshAxis",
    "ModelRef",
    "ModuleCost",
    "Offer",
    "Offers",
    "OffloadPlan",
    "OpCost",
    "OpPlan",
    "OptimizerGroup",
    "Overheads",
    "ParamPlan",
    "PiecePrediction",
    "Pipeline",
    "Plan",
    "Predicted",
    "Profile",
    "Record",
    "Refusal",
    "Remedy",
    "Report",
    "Run",
    "SelfCheck",
    "ShapePlan",
    "SolverInfo",
    "StagePrediction",
    "StreamPlan",
    "StreamPredicted",
    "SweepPoint",
    "Tier",
    "TierPlan",
    "UserError",
    "check_range",
    "diff",
    "is_installed",
    "need",
    "needed",
    "parse_bytes",
    "parse_count",
]
