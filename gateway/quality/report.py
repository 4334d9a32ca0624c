"""All that the quality gate has to show, for the operator's routes and the dashboard."""

from __future__ import annotations

import msgspec

from gateway.quality.gate import TemplateQuality
from gateway.quality.shadows import ShadowStatus

__all__ = ["QualityReport"]


class QualityReport(msgspec.Struct, frozen=True):
    """Every template of which something was measured, and how asking again does on this gateway."""

    templates: list[TemplateQuality]
    shadows: ShadowStatus
