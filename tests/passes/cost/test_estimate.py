"""Prices and memory of real programs: against XLA's own analysis, against limits, against sums by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training import train_state

from hetjax.frontend.planning import Options, build_bundle
from hetjax.frontend.calls import Structure
from hetjax.ir import presets
from hetjax.ir.cluster import Cluster
from hetjax.ir.errors import PlanError
from hetjax.passes.cost.estimate import estimate_program
from hetjax.passes.cost.memory import fragment_memory, stage_memory
from hetjax.passes.cost.program_price import axis_group, fragment_price
from hetjax.passes.cost.roofline import Efficiency
from hetjax.runtime.compiler import compile_program
