"""What turns a graph into a plan and a plan into a program; imports only `hetjax.ir`."""
