"""Every rule over programs and task lists fires on its violation, with its message."""

import dataclasses

import pytest

from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import VerifyError
from hetjax.ir.graph import Aval
from hetjax.ir.parser import parse_bundle, parse_program
from hetjax.ir.program_rules import PROGRAM_RULES
from hetjax.ir.schedule_rules import SCHEDULE_RULES
from hetjax.ir.verify import verify_bundle, verify_program

# w is updated from two stages' work on two microbatches, under 1F1B.
PROGRAM = """program step {
  microbatches 2
  schedule "1f1b"
  mesh s0 of fast at east (data=2) devices (0,1)
  mesh s1 of slow at west (data=1,model=2) devices (2,3)
  fragment s0/forward on 0 forward level 0 {
    in %0:f32[8,4] step
    in %1:f32[16|8@data,8] micro axis 0
    %2:f32[16|8,4] = dot_general %1 %0 {dimension_numbers=(((1,),(0,)),((),()))}
    out %2:f32[16|8@data,4] micro
  }
  fragment s1/forward on 1 forward level 0 {
    in %2:f32[16|8,4@model] micro
    %3:f32[16|8,4] = tanh %2 from "train.py:9"
    out %3:f32[16|8,4@model] micro
  }
  fragment s1/backward on 1 backward level 0 {
    in %2:f32[16|8,4@model] micro
    in %3:f32[16|8,4@model] micro
    %4:f32[16|8,4] = mul %2 %3
    %5:f32[] = reduce_sum %4 {axes=(0,1)}
    out %4:f32[16|8,4@model] micro
    out %5:f32[] sum
  }
  fragment s0/backward on 0 backward level 0 {
    in %1:f32[16|8@data,8] micro axis 0
    in %4:f32[16|8@data,4] micro
    %6:f32[8,4] = dot_general %1 %4 {dimension_numbers=(((0,),(0,)),((),()))}
    out %6:f32[8,4] sum
  }
  fragment s0/update on 0 update level 0 {
    in %0:f32[8,4] step donated
    in %6:f32[8,4] sum scale 0.5
    %7:f32[8,4] = sub %0 %6
    out %7:f32[8,4] step
  }
  fragment s1/update on 1 update level 0 {
    in %3:f32[16|8,4@model] concat axis 0
    in %5:f32[] sum scale 0.5
    %8:f32[] = neg %5
    out %8:f32[] step
    out %3:f32[16|8,4@model] step
  }
  reshard x2:s0>s1 micro from 0 %2:f32[16|8@data,4] to 1 %2:f32[16|8,4@model] bytes 128 {
    piece 0 to 2 (0,0) (4,2)
    piece 0 to 3 (0,2) (4,4)
    piece 1 to 2 (4,0) (8,2)
    piece 1 to 3 (4,2) (8,4)
  }
  reshard x4:s1>s0 micro from 1 %4:f32[16|8,4@model] to 0 %4:f32[16|8@data,4] bytes 128
  tasks 0 {
    F0 s0/forward
    send0 x2:s0>s1
    F1 s0/forward
    send1 x2:s0>s1
    recv0 x4:s1>s0
    B0 s0/backward
    recv1 x4:s1>s0
    B1 s0/backward
    update s0/update
  }
  tasks 1 {
    recv0 x2:s0>s1
    F0 s1/forward
    B0 s1/backward
    send0 x4:s1>s0
    recv1 x2:s0>s1
    F1 s1/forward
    B1 s1/backward
    send1 x4:s1>s0
    update s1/update
  }
  feed 0 to 0 step spec(-,-)
  feed 1 to 0 micro spec(data,-) axis 0
  return 0 from 0 %7 spec(-,-) step
  return 1 from 1 %8 spec() step
  return 2 from 1 %3 spec(-,model) step
  result %7 "state.w" updates 0
  result %8 "out/loss"
  result %3 "out/y"
}
"""


def problems(text):
    with pytest.raises(VerifyError) as caught:
        verify_program(parse_program(text))
    return caught.value.problems


@pytest.mark.quick
def test_a_valid_program_passes():
    verify_program(parse_program(PROGRAM))


def test_a_program_without_task_lists_is_not_asked_for_them():
    start, end = PROGRAM.index("  tasks 0"), PROGRAM.index("  feed 0")
    verify_program(parse_program(PROGRAM[:start] + PROGRAM[end:]))


FAULTS = [
    ("names", "fragment s1/forward on 1", "fragment s0/forward on 1", "two fragments or reshards are called s0/forward"),
    ("names", "microbatches 2", "microbatches 0", "microbatches is 0; it must be at least 1"),
    ("names", "s1/forward on 1 forward", "s1/forward on 1 fwd", "fragment s1/forward has phase 'fwd'; phases are prologue, forward, backward, weight, update"),
    ("names", "s1/forward on 1", "s1/forward on 7", "fragment s1/forward is on stage 7, but there are 2 meshes"),
    ("names", "%6:f32[8,4] sum\n", "%6:f32[8,4] last\n", "fragment s0/backward gives %6 as 'last'; it may be step, micro, sum"),
    ("names", "x2:s0>s1 micro from 0", "x2:s0>s1 concat from 0", "reshard x2:s0>s1 carries its value as 'concat'; it may be step, micro, sum, last"),
    ("names", "micro from 0", "micro from 5", "reshard x2:s0>s1 starts on stage 5, but there are 2 meshes"),
    ("meshes", "mesh s1 of", "mesh s0 of", "two meshes are called s0"),
    ("meshes", "(data=2) devices (0,1)", "(data=2) devices (0,1,5)", "mesh s0 has axes of 2 devices in all, and names 3"),
    ("meshes", "(data=2) devices (0,1)", "(data=2) devices (0,0)", "mesh s0 names a device twice: [0, 0]"),
    ("meshes", "(data=1,model=2)", "(model=1,model=2)", "mesh s1 has two axes model"),
    ("meshes", "(data=1,model=2)", "(data=0,model=2)", "mesh s1 has an axis of size less than 1: {'data': 0, 'model': 2}"),
    ("value-types", "  mesh s0", "  values %5:f32[] micro f32[2]\n  mesh s0", "%5 is f32[] at full batch but f32[2] in one microbatch"),
    ("specs", "in %2:f32[16|8,4@model] micro\n    %3", "in %2:f32[16|8,4@modle] micro\n    %3",
     "s1/forward reads %2: mesh s1 has no axis 'modle'; did you mean 'model'?"),
    ("specs", "in %2:f32[16|8,4@model] micro\n    %3", "in %2:f32[16|8@model,4@model] micro\n    %3",
     "s1/forward reads %2: axis 'model' splits it twice"),
    ("specs", "mesh s1 of slow at west (data=1,model=2) devices (2,3)", "mesh s1 of slow at west (data=1,model=3) devices (2,3,4)",
     's1/forward gives %3 (output "out/y"): dimension 1 of size 4 does not divide over model of size 3 on mesh s1; replicate it, or pad it to 6'),
    ("specs", "in %0:f32[8,4] step\n", "in %0:f32[8,4] spec(data) step\n", "s0/forward reads %0: its spec has 1 entries for 2 dimensions (f32[8,4])"),
    ("specs", "micro spec(data,-) axis 0", "micro spec(tada,-) axis 0", "input 1 is fed to s0 split over axis 'tada', which it does not have"),
    ("ports", "out %7:f32[8,4] step", "out %0:f32[8,4] step out %2:f32[16|8,4] step", "fragment s0/update gives %2, which none of its ops or inputs has"),
    ("ports", "in %6:f32[8,4] sum scale 0.5", "in %6:f32[8,4] sum scale 0.5 in %6:f32[8,4] sum scale 0.5", "fragment s0/update reads %6 as 'sum' 2 times"),
    ("ports", "out %8:f32[] step", "out %8:f32[] micro", "fragment s1/update runs once and gives %8 as 'micro'"),
    ("ports", "concat axis 0", "concat", "fragment s1/update reads %3 concatenated, without an axis"),
    ("ports", "concat axis 0", "concat axis 5", "fragment s1/update reads %3 along axis 5; it has 2 dimensions"),
    ("ports", "in %4:f32[16|8@data,4] micro", "in %4:f32[16|8@data,4] last", "fragment s0/backward runs per microbatch and reads %4 as 'last', which exists after the last"),
    ("ports", "  in %6:f32[8,4] sum", "  donates 9 9\n in %6:f32[8,4] sum", "fragment s0/update donates input 9, but inputs go up to 1"),
    ("ports", "  in %6:f32[8,4] sum", "  donates 9 9\n in %6:f32[8,4] sum", "fragment s0/update donates input 9 twice"),
    ("accumulators", "    out %2:f32[16|8@data,4] micro", "    %6:f32[8,4] = neg %0\n out %6:f32[8,4] sum\n out %2:f32[16|8@data,4] micro",
     "%6 is accumulated on stage 0 by s0/forward, s0/backward; one fragment may"),
    ("accumulators", "in %5:f32[] sum scale 0.5", "in %5:f32[] sum scale 0.5 in %6:f32[8,4] sum scale 0.25", "the sum %6 is scaled by 0.5 in s0/update and by 0.25 in s1/update"),
    ("accumulators", "in %6:f32[8,4] sum scale 0.5", "in %6:f32[8@data,4] sum scale 0.5", "the sum %6 is given by s0/backward and read by s0/update with another spec"),
    ("reshard-ends", "from 1 %4:f32[16|8,4@model] to 0 %4", "from 0 %4:f32[16|8@data,4] to 0 %4", "reshard x4:s1>s0 goes from stage 0 to itself"),
    ("reshard-ends", "micro from 1 %4:f32[16|8,4@model]", "sum from 1 %4:f32[16|8,4@model]", "reshard x4:s1>s0: no fragment of stage 1 gives %4 as 'sum'"),
    ("reshard-ends", "micro from 1 %4:f32[16|8,4@model]", "sum from 1 %4:f32[16|8,4@model]", "reshard x4:s1>s0: no fragment of stage 0 reads %4 as 'sum'"),
    ("reshard-ends", "from 1 %4:f32[16|8,4@model]", "from 1 %4:f32[16|8,4]", "reshard x4:s1>s0 takes %4 with another spec than stage 1 gives it"),
    ("reshard-ends", "to 0 %4:f32[16|8@data,4] bytes", "to 0 %4:f32[16|8,4] bytes", "reshard x4:s1>s0 brings %4 with another spec than stage 0 reads it"),
    ("reshard-ends", "to 0 %4:f32[16|8@data,4] bytes 128", "to 0 %4:f32[16|8@data,4] bytes 7", "reshard x4:s1>s0 says 7 bytes, but f32[8,4] has 128"),
    ("reshard-ends", "piece 0 to 2 (0,0) (4,2)", "piece 7 to 2 (0,0) (4,2)", "reshard x2:s0>s1 has a piece from device 7 to 2, which are not on its meshes"),
    ("reshard-ends", "piece 0 to 2 (0,0) (4,2)", "piece 3 to 2 (0,0) (4,2)", "reshard x2:s0>s1 has a piece (0, 0) to (4, 2) from device 3, which neither holds all of it nor got it"),
    ("reshard-ends", "piece 0 to 2 (0,0) (4,2)", "piece 1 to 2 (0,0) (4,2)", "reshard x2:s0>s1 has a piece (0, 0) to (4, 2) from device 1, which neither holds all of it nor got it"),
    ("reshard-ends", "piece 0 to 2 (0,0) (4,2)", "piece 0 to 2 (0,0) (40,2)", "reshard x2:s0>s1 has a piece (0, 0) to (40, 2), which is no block of f32[8,4]"),
    ("reshard-ends", "piece 1 to 2 (4,0) (8,2)", "piece 0 to 2 (0,0) (4,2)", "reshard x2:s0>s1 never brings device 2 the block (4, 0) to (8, 2)"),
    ("reshard-ends", "    piece 0 to 2 (0,0) (4,2)\n", "", "reshard x2:s0>s1 brings device 2 8 elements of f32[8,4]; its share is 16"),
    ("returns", "return 2 from 1 %3 spec(-,model) step", "", 'output "out/y" is not returned: it is lost'),
    ("returns", "return 2 from", "return 1 from", 'output "out/loss" is returned 2 times'),
    ("returns", "return 2 from", "return 9 from", "output 9 is returned, but outputs go up to 2"),
    ("returns", "return 1 from 1 %8", "return 1 from 1 %5", 'output "out/loss" is 8 but %5 is returned for it'),
    ("returns", "return 1 from 1", "return 1 from 0", "output \"out/loss\": no fragment of stage 0 gives %8 as 'step'"),
    ("returns", '"out/y"\n', '"out/y" updates 0\n', "input 0 is updated by 2 outputs"),
    ("feeds", "feed 0 to 0 step spec(-,-)", "feed 0 to 0 step spec(-,-) feed 0 to 0 step spec(-,-)", "input 0 is fed to stage 0 as 'step' 2 times"),
    ("feeds", "feed 0 to 0", "feed 0 to 4", "input 0 is fed to stage 4, but there are 2 meshes"),
    ("feeds", "feed 0 to 0 step", "feed 0 to 0 sum", "input 0 is fed as 'sum'; it may be step or micro"),
    ("feeds", "micro spec(data,-) axis 0", "micro spec(data,-)", "input 1 is fed per microbatch, without an axis"),
    ("tasks-known", "  tasks 1 {", "  tasks 1 { }\n  tasks 2 {", "there are 3 task lists for 2 meshes"),
    ("tasks-known", "    B0 s0/backward", "    X0 s0/backward", "task 5 of stage 0 (X0 s0/backward): kinds are F, B, I, W"),
    ("tasks-known", "    B0 s0/backward", "    B0 s0/backward on 1", "task 5 of stage 0 (B0 s0/backward) says it is of stage 1"),
    ("tasks-known", "send0 x2:s0>s1", "send0 x9:s0>s1", "task 1 of stage 0 (send0 x9:s0>s1): there is no reshard of that name"),
    ("tasks-known", "send0 x2:s0>s1", "recv0 x2:s0>s1", "task 1 of stage 0 (recv0 x2:s0>s1): x2:s0>s1 ends on another stage"),
    ("tasks-known", "F0 s0/forward", "F0 s0/backwards", "task 0 of stage 0 (F0 s0/backwards): there is no fragment of that name"),
    ("tasks-known", "F0 s0/forward", "F0 s1/forward", "task 0 of stage 0 (F0 s1/forward): that fragment is on stage 1"),
    ("tasks-known", "    B0 s0/backward", "    F0 s0/backward", "task 5 of stage 0 (F0 s0/backward): a backward fragment is run by B or I or W"),
    ("tasks-known", "    B0 s0/backward", "    B7 s0/backward", "task 5 of stage 0 (B7 s0/backward): microbatches are 0 to 1"),
    ("runs", "    B1 s0/backward\n", "", "fragment s0/backward runs never for microbatch 1"),
    ("runs", "    B1 s0/backward\n", "    B1 s0/backward\n B1 s0/backward\n", "fragment s0/backward runs more than once for microbatch 1"),
    ("runs", "    update s0/update\n", "", "fragment s0/update runs never"),
    ("runs", "    update s0/update\n", "    update0 s0/update\n", "fragment s0/update runs though it should not for microbatch 0"),
    ("runs", "    B1 s0/backward\n", "    I1 s0/backward\n", "the W half of fragment s0/backward runs never for microbatch 0, 1"),
    ("runs", "    send1 x4:s1>s0\n", "", "reshard x4:s1>s0 has a send never for microbatch 1"),
    ("reads-before-made", "    F0 s1/forward\n    B0 s1/backward\n", "    B0 s1/backward\n    F0 s1/forward\n",
     "task 1 of stage 1 (B0 s1/backward) reads %3 before the stage has it"),
    ("reads-before-made", "    B1 s1/backward\n    send1 x4:s1>s0\n", "    send1 x4:s1>s0\n    B1 s1/backward\n",
     "task 6 of stage 1 (send1 x4:s1>s0) sends %4 before the stage has it"),
    ("reads-before-made", "in %6:f32[8,4] sum scale 0.5", "in %6:f32[8,4] sum scale 0.5 in %5:f32[] sum scale 0.5",
     "task 8 of stage 0 (update s0/update) reads %5, which another stage makes and no reshard brings; run the pass 'insert-reshards'"),
    ("reads-before-made", "    B1 s0/backward\n    update s0/update\n", "    update s0/update\n    B1 s0/backward\n",
     "task 7 of stage 0 (update s0/update) reads %6 before the stage has it"),
    ("deadlock", "    send0 x2:s0>s1\n    F1 s0/forward\n    send1 x2:s0>s1\n    recv0 x4:s1>s0\n", "    recv0 x4:s1>s0\n    send0 x2:s0>s1\n    F1 s0/forward\n    send1 x2:s0>s1\n",
     "the task lists never end; these wait for a send that does not come: task 1 of stage 0 (recv0 x4:s1>s0); task 0 of stage 1 (recv0 x2:s0>s1)"),
]


@pytest.mark.parametrize(("rule", "old", "new", "message"), FAULTS, ids=[f"{f[0]}-{i}" for i, f in enumerate(FAULTS)])
def test_each_rule_says_what_is_wrong(rule, old, new, message):
    assert old in PROGRAM
    found = problems(PROGRAM.replace(old, new, 1))
    assert any(p.startswith(f"program step: {rule}: {message}") for p in found), "\n".join(found)


def test_every_program_rule_has_a_test():
    assert {r.name for r in (*PROGRAM_RULES, *SCHEDULE_RULES)} == {f[0] for f in FAULTS}


def test_refs_and_tables_out_of_range_are_refused():
    program = parse_program(PROGRAM)
    with pytest.raises(VerifyError, match=r"value-types: 9 values have types at full batch, 8 in one microbatch"):
        verify_program(program.replace(micro_avals=program.micro_avals[:-1]))
    f = program.fragments[0]
    port = dataclasses.replace(f.inputs[0], ref=99)
    with pytest.raises(VerifyError, match=r"fragment s0/forward has a port for %99, but values go up to %8"):
        verify_program(program.replace(fragments=(dataclasses.replace(f, inputs=(port,)), *program.fragments[1:])))
    r = dataclasses.replace(program.reshards[0], ref=99)
    with pytest.raises(VerifyError, match=r"reshard x2:s0>s1 carries %99, but values go up to %8"):
        verify_program(program.replace(reshards=(r, *program.reshards[1:])))


def test_ops_of_fragments_are_checked_with_the_types_of_their_phase():
    found = problems(PROGRAM.replace("%3:f32[16|8,4] = tanh %2", "%3:f32[16|8,4] = tanh %4"))
    assert found[0].startswith(
        "program step, fragment s1/forward: dominance: tanh reads %4, which nothing gives (train.py:9)"
    )
    assert "    %3:f32[8,4] = tanh %4\n" in found[0]


BUNDLE = """
graph step {
  in %0:f32[2] state "state.w"
  in %1:f32[4,2] batch(0) "x"
  %2:f32[2] = neg %0
  out %2 "state.w" updates 0
}
microbatching 2 {
  types R B(0) R
  graph step {
    in %0:f32[2] state "state.w"
    in %1:f32[2,2] batch(0) "x"
    %2:f32[2] = neg %0
    out %2 "state.w" updates 0
  }
}
program step {
  microbatches 2
  schedule gpipe
  mesh s0 of cpu at here (data=1) devices (0)
  values %1:f32[4|2,2]
  fragment s0/update on 0 update level 0 {
    in %0:f32[2] step
    %2:f32[2] = neg %0
    out %2:f32[2] step
  }
  feed 0 to 0 step spec(-)
  return 0 from 0 %2 spec(-) step
  result %2 "state.w" updates 0
}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("", "", ""),
        ("microbatching 2", "microbatching 0", "microbatching: same-step: there are 0 microbatches; at least 1"),
        ("types R B(0) R", "types R", "microbatching: same-step: 1 values have a batch type, 3 exist"),
        ("    %2:f32[2] = neg", "    %2:f32[2] = exp", "microbatching: same-step: the step at one microbatch has other ops than the step at full batch"),
        ("    %2:f32[2] = neg %0\n    out %2 \"state.w\" updates 0\n  }", "    %2:f32[2] = neg %0\n    out %2 \"state.w\" updates 0\n unused %3:f32[] }",
         "microbatching: same-step: 4 values at one microbatch, 3 at full batch"),
        ("[2,2] batch(0)", "[2,2] batch(5)", 'graph step at one microbatch: roles: input "x" has batch axis 5'),
        ("f32[4|2,2]", "f32[8|2,2]", "program: same-step: its values are not those of the graph"),
        ('result %2 "state.w"', 'result %2 "state.v"', "program: same-step: its outputs are not those of the graph"),
        ("feed 0 to", "feed 6 to", "program: same-step: input 6 is fed, but inputs go up to 1"),
        ("  microbatches 2", "  microbatches 1", "program: same-step: it has 1 microbatches, 2 are proved"),
    ],
)
def test_the_parts_of_a_bundle_belong_together(old, new, message):
    bundle = parse_bundle(BUNDLE.replace(old, new, 1))
    if not message:
        verify_bundle(bundle)
        return
    with pytest.raises(VerifyError) as caught:
        verify_bundle(bundle)
    assert any(p.startswith(message) for p in caught.value.problems), caught.value.problems


def test_an_empty_bundle_is_valid():
    verify_bundle(Bundle())


def test_prologue_values_reach_every_microbatch():
    text = PROGRAM.replace(
        "  fragment s0/forward on 0", "  fragment s0/prologue on 0 prologue level 0 {\n in %0:f32[8,4] step\n"
        " %9:f32[8,4] = neg %0\n out %9:f32[8,4] step\n }\n  fragment s0/forward on 0",
    ).replace("    in %1:f32[16|8@data,8] micro axis 0\n    %2", "    in %9:f32[8,4] step\n    in %1:f32[16|8@data,8] micro axis 0\n    %2")
    late = problems(text.replace("    F0 s0/forward\n", "    F0 s0/forward\n    prologue s0/prologue\n", 1))
    assert late == ("program step: reads-before-made: task 0 of stage 0 (F0 s0/forward) reads %9 before the stage has it",)
    verify_program(parse_program(text.replace("    F0 s0/forward\n", "    prologue s0/prologue\n    F0 s0/forward\n", 1)))


def test_split_backwards_count_both_halves():
    text = PROGRAM
    for m in (0, 1):
        text = text.replace(f"    B{m} s0/backward\n", f"    I{m} s0/backward\n    W{m} s0/backward\n")
    verify_program(parse_program(text))


def test_unknown_dtypes_of_values_are_found_inside_fragments():
    program = parse_program(PROGRAM)
    wrong = (*program.avals[:-1], Aval("f33", ()))
    with pytest.raises(VerifyError, match=r"known-types: %8 has type f33\[\]: an unknown dtype"):
        verify_program(program.replace(avals=wrong, micro_avals=wrong))
