"""Linear systems: relaxation (SOR, SSOR-PCG), bandits that tune ω over a stream of systems, learned directions."""

from .cheb_cb import ChebCB
from .dcdm import dcdm, solve_dcdm
from .direction_net import DirectionNet
from .direction_training import train_direction_net
from .grid import Family, PoissonGrid, RitzFamily
from .heat import HeatStream, heat_coefficient
from .sor import optimal_omega, solve_sor, sor
from .ssor_pcg import solve_ssor_pcg, ssor_pcg
from .system import LinearResult
from .tsallis_inf import TsallisINF, TsallisINFCB
from .tuner import OMEGAS, Stream, Tuner, solve_stream

__all__ = [
    "OMEGAS",
    "ChebCB",
    "DirectionNet",
    "Family",
    "HeatStream",
    "LinearResult",
    "PoissonGrid",
    "RitzFamily",
    "Stream",
    "TsallisINF",
    "TsallisINFCB",
    "Tuner",
    "dcdm",
    "heat_coefficient",
    "optimal_omega",
    "solve_dcdm",
    "solve_sor",
    "solve_ssor_pcg",
    "solve_stream",
    "sor",
    "ssor_pcg",
    "train_direction_net",
]
