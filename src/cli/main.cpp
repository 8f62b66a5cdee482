// Entry point of `cachalot`.
#include "cli/application.h"

int main(int argc, char** argv) { return cachalot::run_application(argc, argv); }
