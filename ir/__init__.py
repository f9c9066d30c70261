"""What a program, a machine and a plan are; imports nothing else of hetjax."""
