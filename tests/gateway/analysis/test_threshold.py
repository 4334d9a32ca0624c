"""Conditions on figures."""

from __future__ import annotations

import pytest

from gateway.analysis.threshold import Threshold

FIGURES = {"hit_rate.as_is.inf": 0.3, "volatile": 0.25}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("hit_rate.as_is.inf<0.5", True),
        ("hit_rate.as_is.inf < 0.3", False),
        ("hit_rate.as_is.inf<=0.3", True),
        ("volatile>10%", True),
        ("volatile>=0.26", False),
        ("volatile==0.25", True),
        ("volatile!=0.25", False),
    ],
)
def test_a_condition_holds_or_does_not(text: str, holds: bool) -> None:
    finding = Threshold.parse(text).finding(FIGURES)
    assert (finding is not None) == holds
    assert finding is None or finding.startswith(text.split("<")[0].split(">")[0].split("=")[0].strip())


@pytest.mark.parametrize("text", ["", "volatile", "volatile>", ">0.1", "volatile=>0.1", "volatile>x", "volatile>1.2.3"])
def test_a_malformed_condition_says_what_is_expected(text: str) -> None:
    with pytest.raises(ValueError, match=r"volatile>0\.1|no number"):
        Threshold.parse(text)


def test_an_unknown_figure_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"hit_rate\.as_is\.inf, volatile"):
        Threshold.parse("speed>1").finding(FIGURES)
