! pmm3d from Fortran: compile this file with the program's own compiler and options, and link with -lpmm3d. It needs
! Fortran 2018 (gfortran: no option, or -std=f2018).
!
! pmm3d.h describes every function, and has the rules for errors, the order of calls and threads. In Fortran a
! communicator is an integer (with mpi_f08: comm%mpi_val), texts have any length, rows and columns count from 1, and a
! shard stored by columns has the order 'F'.
!
! Integers are default integers, also in descriptors. With -i8 or -fdefault-integer-8 they have 8 bytes: compile this
! file with the same option. Those of class(*) may have 4 or 8 bytes: communicators, boxes, rows and columns of matrices,
! sizes for a grid, and bytes. A box is rows box(1) to box(2) and columns box(3) to box(4), counted from 1, the ends
! included. The end of an empty box is its beginning minus 1.
!
! alpha, beta and arrays have the type of the matrices; other types are refused. The real factors of p?herk and p?her2k
! are real numbers of its precision. Arrays are used in place: give a shard, and the arrays of a plan, the attribute
! target. A section with gaps, such as a(1:n, :), is refused. Pass an array of one or two dimensions, whole columns, or
! the first element. A shard of two dimensions has the shape of its box.
module pmm3d
    use, intrinsic :: iso_c_binding, only: c_associated, c_char, c_double, c_float, c_int, c_int32_t, c_int64_t, &
                                           c_loc, c_null_char, c_null_ptr, c_ptr, c_signed_char
    implicit none
    private
    public :: pmm3d_start, pmm3d_finalize, pmm3d_last_error, pmm3d_error_everywhere, pmm3d_grid, pmm3d_grid_for, &
              pmm3d_grid_shape, pmm3d_context, pmm3d_context_trim, pmm3d_max_workspace, pmm3d_library, pmm3d_box, &
              pmm3d_matrix, pmm3d_free, pmm3d_run, pmm3d_run_matmul, pmm3d_run_pgemm, pmm3d_begin, pmm3d_wait, &
              pmm3d_matmul, pmm3d_redistribute, pmm3d_cholesky_qr, pmm3d_from_block_cyclic, &
              pmm3d_to_block_cyclic, pmm3d_from_blocks, &
              pmm3d_to_blocks, pmm3d_plan_matmul, pmm3d_plan_redistribute, pmm3d_plan_from_block_cyclic, &
              pmm3d_plan_to_block_cyclic, pmm3d_plan_from_blocks, pmm3d_plan_to_blocks
    public :: pmm3d_pgemm, pmm3d_pgemr2d, pmm3d_ptran, pmm3d_ptranu, pmm3d_ptranc, pmm3d_pgeadd, pmm3d_psyrk, &
              pmm3d_pherk, pmm3d_psyr2k, pmm3d_pher2k, pmm3d_psymm, pmm3d_phemm, pmm3d_ptrmm, pmm3d_ptrsm, &
              pmm3d_ppotrf, pmm3d_ppotrs, pmm3d_pposv, pmm3d_ptrtri, pmm3d_plan_pgemm, pmm3d_plan_pgemr2d, &
              pmm3d_plan_ptran, pmm3d_plan_ptranu, pmm3d_plan_ptranc, pmm3d_plan_pgeadd

    integer, parameter, public :: PMM3D_OK = 0, PMM3D_ERROR_ARGUMENT = 1, PMM3D_ERROR_DISAGREEMENT = 2, &
        PMM3D_ERROR_MEMORY = 3, PMM3D_ERROR_MPI = 4, PMM3D_ERROR_PYTHON = 5, PMM3D_ERROR_THREAD = 6, &
        PMM3D_ERROR_OTHER = 8

    ! at_once: in place of the address of a plan. there: in place of the address of a result, which `made` stores.
    integer, parameter :: w = c_int64_t, width = storage_size(0)/8
    integer(w), parameter :: at_once = -1, there = 1

    ! Functions in C. Characters are passed by value as small integers: gfortran 12 passes a dummy character argument
    ! wrongly.
    interface
        integer(c_int) function start_in_c() bind(C, name="pmm3d_start")
            import :: c_int
        end function

        integer(c_int) function finalize_in_c() bind(C, name="pmm3d_finalize")
            import :: c_int
        end function

        integer(c_int) function everywhere_in_c() bind(C, name="pmm3d_error_everywhere")
            import :: c_int
        end function

        integer(c_int) function last_error(text, size) bind(C, name="pmm3d_last_error")
            import :: c_char, c_int
            character(kind=c_char), intent(out) :: text(*)
            integer(c_int), value :: size
        end function

        integer(c_int) function grid_in_c(comm, gx, gy, gz, grid) bind(C, name="pmm3d_grid_f")
            import :: c_int
            integer(c_int), value :: comm, gx, gy, gz
            integer(c_int), intent(out) :: grid
        end function

        integer(c_int) function grid_for_in_c(comm, type, m, n, k, grid) bind(C, name="pmm3d_grid_for_f")
            import :: c_int, c_int64_t, c_signed_char
            integer(c_int), value :: comm
            integer(c_signed_char), value :: type
            integer(c_int64_t), value :: m, n, k
            integer(c_int), intent(out) :: grid
        end function

        integer(c_int) function context_in_c(comm, rows, columns, order, context) bind(C, name="pmm3d_context_f")
            import :: c_int, c_signed_char
            integer(c_int), value :: comm, rows, columns
            integer(c_signed_char), value :: order
            integer(c_int), intent(out) :: context
        end function

        integer(c_int) function free_in_c(object) bind(C, name="pmm3d_free")
            import :: c_int
            integer(c_int), intent(inout) :: object
        end function

        integer(c_int) function wait_in_c(request) bind(C, name="pmm3d_wait")
            import :: c_int
            integer(c_int), intent(inout) :: request
        end function

        integer(c_int) function call_in_c(name, arguments, count, results) bind(C, name="pmm3d_call")
            import :: c_char, c_int, c_int64_t
            character(kind=c_char), intent(in) :: name(*)
            integer(c_int64_t) :: arguments(*)
            integer(c_int), value :: count
            integer(c_int64_t), intent(inout) :: results(4)
        end function
    end interface

contains

    integer function pmm3d_start() result(code)
        code = start_in_c()
    end function

    integer function pmm3d_finalize() result(code)
        code = finalize_in_c()
    end function

    integer function pmm3d_error_everywhere() result(answer)
        answer = everywhere_in_c()
    end function

    ! The text of the last error of this thread, also after calls that succeed.
    function pmm3d_last_error() result(text)
        character(len=:), allocatable :: text
        character(kind=c_char) :: nothing(1)
        character(kind=c_char), allocatable :: found(:)
        integer(c_int) :: length, i
        length = last_error(nothing, 1_c_int)
        allocate (found(length))
        length = last_error(found, length)
        allocate (character(len=size(found) - 1) :: text)
        do i = 1, len(text, c_int)
            text(i:i) = found(i)
        end do
    end function

    integer function pmm3d_grid(comm, gx, gy, gz, grid) result(code)
        class(*), intent(in) :: comm
        integer, intent(in) :: gx, gy, gz
        integer, intent(out) :: grid
        integer(c_int) :: found
        code = grid_in_c(int(wide(comm), c_int), int(gx, c_int), int(gy, c_int), int(gz, c_int), found)
        grid = found
    end function

    integer function pmm3d_grid_for(comm, type, m, n, k, grid) result(code)
        class(*), intent(in) :: comm, m, n, k
        character, intent(in) :: type
        integer, intent(out) :: grid
        integer(c_int) :: found
        code = grid_for_in_c(int(wide(comm), c_int), as_char(type), wide(m), wide(n), wide(k), found)
        grid = found
    end function

    integer function pmm3d_context(comm, rows, columns, order, context) result(code)
        class(*), intent(in) :: comm
        integer, intent(in) :: rows, columns
        character, intent(in) :: order
        integer, intent(out) :: context
        integer(c_int) :: found
        code = context_in_c(int(wide(comm), c_int), int(rows, c_int), int(columns, c_int), as_char(order), found)
        context = found
    end function

    integer function pmm3d_free(object) result(code)
        integer, intent(inout) :: object
        integer(c_int) :: number
        number = int(object, c_int)
        code = free_in_c(number)
        object = number
    end function

    integer function pmm3d_grid_shape(grid, shape) result(code)
        integer, intent(in) :: grid
        integer, intent(out) :: shape(3)
        integer(w) :: found(4)
        code = called("grid_shape", [integer(w) :: grid, there], found)
        shape = int(found(:3))
    end function

    integer function pmm3d_max_workspace(object, bytes) result(code)
        integer, intent(in) :: object
        class(*), intent(in) :: bytes
        code = called("max_workspace", [integer(w) :: object, wide(bytes)])
    end function

    integer function pmm3d_library(object, library) result(code)
        integer, intent(in) :: object
        character(len=*), intent(in) :: library
        character(kind=c_char), target :: text(len(library) + 1)
        text = c_text(library)
        code = called("library", [integer(w) :: object, place(text)])
    end function

    integer function pmm3d_context_trim(context) result(code)
        integer, intent(in) :: context
        code = called("context_trim", [integer(w) :: context])
    end function

    integer function pmm3d_box(grid, layout, rows, columns, box) result(code)
        integer, intent(in) :: grid
        class(*), intent(in) :: rows, columns
        character(len=*), intent(in) :: layout
        class(*), intent(out) :: box(4)
        character(kind=c_char), target :: text(len(layout) + 1)
        integer(w) :: found(4), bytes
        bytes = 0
        select type (box)
        type is (integer(c_int32_t)); bytes = 4
        type is (integer(c_int64_t)); bytes = 8
        end select
        text = c_text(layout)
        code = called("box", [integer(w) :: grid, place(text), wide(rows), wide(columns), there, bytes], found)
        found = found + [1, 0, 1, 0]
        select type (box)
        type is (integer(c_int32_t)); box = int(found, c_int32_t)
        type is (integer(c_int64_t)); box = found
        end select
    end function

    ! type: that of the shard.
    integer function pmm3d_matrix(grid, type, rows, columns, layout, order, shard, matrix) result(code)
        integer, intent(in) :: grid
        class(*), intent(in) :: rows, columns
        character, intent(in) :: type, order
        character(len=*), intent(in) :: layout
        class(*), intent(inout), target :: shard(..)
        integer, intent(out) :: matrix
        character(kind=c_char), target :: text(len(layout) + 1)
        integer(w) :: elements, leading
        elements = -1
        leading = -1
        select rank (shard)
        rank (1); elements = size(shard, kind=w)
        rank (2); elements = size(shard, kind=w); leading = size(shard, 1, w)
        end select
        text = c_text(layout)
        code = made("matrix", [integer(w) :: grid, codes(type), wide(rows), wide(columns), place(text), codes(order), &
                               place(shard), type_in(shard), elements, leading, there], matrix)
    end function

    integer function pmm3d_run(plan) result(code)
        integer, intent(in) :: plan
        code = called("run", [integer(w) :: plan])
    end function

    integer function pmm3d_run_matmul(plan, alpha, a, b, beta, c) result(code)
        integer, intent(in) :: plan, a, b, c
        class(*), intent(in), target :: alpha, beta
        code = called("run_matmul", [integer(w) :: plan, place(alpha), a, b, place(beta), c, type_of(alpha), &
                                     type_of(beta)])
    end function

    integer function pmm3d_run_pgemm(plan, alpha, a, b, beta, c) result(code)
        integer, intent(in) :: plan
        class(*), intent(in), target :: alpha, beta, a(..), b(..)
        class(*), intent(inout), target :: c(..)
        code = called("run_pgemm", [integer(w) :: plan, place(alpha), place(a), place(b), place(beta), place(c), &
                                    type_of(alpha), type_of(beta), type_in(a), type_in(b), type_in(c)])
    end function

    integer function pmm3d_begin(plan, request) result(code)
        integer, intent(in) :: plan
        integer, intent(out) :: request
        code = made("begin", [integer(w) :: plan, there], request)
    end function

    integer function pmm3d_wait(request) result(code)
        integer, intent(inout) :: request
        integer(c_int) :: number
        number = int(request, c_int)
        code = wait_in_c(number)
        request = number
    end function

    integer function pmm3d_matmul(transa, transb, alpha, a, b, beta, c) result(code)
        character, intent(in) :: transa, transb
        class(*), intent(in), target :: alpha, beta
        integer, intent(in) :: a, b, c
        code = called("matmul", [integer(w) :: codes(transa//transb), place(alpha), a, b, place(beta), c, &
                                 type_of(alpha), type_of(beta), at_once])
    end function

    integer function pmm3d_plan_matmul(transa, transb, alpha, a, b, beta, c, plan) result(code)
        character, intent(in) :: transa, transb
        class(*), intent(in), target :: alpha, beta
        integer, intent(in) :: a, b, c
        integer, intent(out) :: plan
        code = made("plan_matmul", [integer(w) :: codes(transa//transb), place(alpha), a, b, place(beta), c, &
                                    type_of(alpha), type_of(beta), there], plan)
    end function

    integer function pmm3d_redistribute(source, target) result(code)
        integer, intent(in) :: source, target
        code = called("redistribute", [integer(w) :: source, target, at_once])
    end function

    integer function pmm3d_cholesky_qr(a, q, r) result(code)
        integer, intent(in) :: a, q, r
        code = called("cholesky_qr", [integer(w) :: a, q, r])
    end function

    integer function pmm3d_plan_redistribute(source, target, plan) result(code)
        integer, intent(in) :: source, target
        integer, intent(out) :: plan
        code = made("plan_redistribute", [integer(w) :: source, target, there], plan)
    end function

    integer function pmm3d_from_block_cyclic(context, a, desca, matrix) result(code)
        integer, intent(in) :: context, matrix
        integer, intent(in), target :: desca(9)
        class(*), intent(in), target :: a(..)
        code = called("from_block_cyclic", [integer(w) :: context, place(a), place(desca), matrix, type_in(a), width, &
                                            at_once])
    end function

    integer function pmm3d_plan_from_block_cyclic(context, a, desca, matrix, plan) result(code)
        integer, intent(in) :: context, matrix
        integer, intent(in), target :: desca(9)
        class(*), intent(inout), target :: a(..)
        integer, intent(out) :: plan
        code = made("plan_from_block_cyclic", [integer(w) :: context, place(a), place(desca), matrix, type_in(a), &
                                               width, there], plan)
    end function

    integer function pmm3d_to_block_cyclic(matrix, context, a, desca) result(code)
        integer, intent(in) :: context, matrix
        integer, intent(in), target :: desca(9)
        class(*), intent(inout), target :: a(..)
        code = called("to_block_cyclic", [integer(w) :: matrix, context, place(a), place(desca), type_in(a), width, &
                                          at_once])
    end function

    integer function pmm3d_plan_to_block_cyclic(matrix, context, a, desca, plan) result(code)
        integer, intent(in) :: context, matrix
        integer, intent(in), target :: desca(9)
        class(*), intent(inout), target :: a(..)
        integer, intent(out) :: plan
        code = made("plan_to_block_cyclic", [integer(w) :: matrix, context, place(a), place(desca), type_in(a), width, &
                                             there], plan)
    end function

    integer function pmm3d_from_blocks(block, box, order, matrix) result(code)
        class(*), intent(in) :: box(4)
        character, intent(in) :: order
        integer, intent(in) :: matrix
        class(*), intent(in), target :: block(..)
        integer(w), target :: bounds(4)
        bounds = all_wide(box)
        code = called("from_blocks", [integer(w) :: place(block), place(bounds), codes(order), matrix, type_in(block), &
                                      1_w, at_once])
    end function

    integer function pmm3d_plan_from_blocks(block, box, order, matrix, plan) result(code)
        class(*), intent(in) :: box(4)
        character, intent(in) :: order
        integer, intent(in) :: matrix
        class(*), intent(inout), target :: block(..)
        integer, intent(out) :: plan
        integer(w), target :: bounds(4)
        bounds = all_wide(box)
        code = made("plan_from_blocks", [integer(w) :: place(block), place(bounds), codes(order), matrix, &
                                         type_in(block), 1_w, there], plan)
    end function

    integer function pmm3d_to_blocks(matrix, block, box, order) result(code)
        class(*), intent(in) :: box(4)
        character, intent(in) :: order
        integer, intent(in) :: matrix
        class(*), intent(inout), target :: block(..)
        integer(w), target :: bounds(4)
        bounds = all_wide(box)
        code = called("to_blocks", [integer(w) :: matrix, place(block), place(bounds), codes(order), type_in(block), &
                                    1_w, at_once])
    end function

    integer function pmm3d_plan_to_blocks(matrix, block, box, order, plan) result(code)
        class(*), intent(in) :: box(4)
        character, intent(in) :: order
        integer, intent(in) :: matrix
        class(*), intent(inout), target :: block(..)
        integer, intent(out) :: plan
        integer(w), target :: bounds(4)
        bounds = all_wide(box)
        code = made("plan_to_blocks", [integer(w) :: matrix, place(block), place(bounds), codes(order), &
                                       type_in(block), 1_w, there], plan)
    end function

    ! ScaLAPACK's routines.

    integer function pmm3d_pgemm(context, type, transa, transb, m, n, k, alpha, a, ia, ja, desca, b, ib, jb, descb, &
                                 beta, c, ic, jc, descc) result(code)
        integer, intent(in) :: context, m, n, k, ia, ja, ib, jb, ic, jc
        character, intent(in) :: type, transa, transb
        integer, intent(in), target :: desca(9), descb(9), descc(9)
        class(*), intent(in), target :: alpha, beta, a(..), b(..)
        class(*), intent(inout), target :: c(..)
        code = called("pgemm", [integer(w) :: width, at_once, context, codes(type//transa//transb), m, n, k, &
                                factor(alpha), part(a, ia, ja, desca), part(b, ib, jb, descb), factor(beta), &
                                part(c, ic, jc, descc)])
    end function

    integer function pmm3d_plan_pgemm(context, type, transa, transb, m, n, k, alpha, a, ia, ja, desca, b, ib, jb, &
                                      descb, beta, c, ic, jc, descc, plan) result(code)
        integer, intent(in) :: context, m, n, k, ia, ja, ib, jb, ic, jc
        character, intent(in) :: type, transa, transb
        integer, intent(in), target :: desca(9), descb(9), descc(9)
        class(*), intent(in), target :: alpha, beta
        class(*), intent(inout), target :: a(..), b(..), c(..)
        integer, intent(out) :: plan
        code = made("plan_pgemm", [integer(w) :: width, there, context, codes(type//transa//transb), m, n, k, &
                                   factor(alpha), part(a, ia, ja, desca), part(b, ib, jb, descb), factor(beta), &
                                   part(c, ic, jc, descc)], plan)
    end function

    integer function pmm3d_pgemr2d(type, m, n, a, ia, ja, desca, contexta, b, ib, jb, descb, contextb) result(code)
        integer, intent(in) :: m, n, ia, ja, contexta, ib, jb, contextb
        character, intent(in) :: type
        integer, intent(in), target :: desca(9), descb(9)
        class(*), intent(in), target :: a(..)
        class(*), intent(inout), target :: b(..)
        code = called("pgemr2d", [integer(w) :: width, at_once, codes(type), m, n, part(a, ia, ja, desca), contexta, &
                                  part(b, ib, jb, descb), contextb])
    end function

    integer function pmm3d_plan_pgemr2d(type, m, n, a, ia, ja, desca, contexta, b, ib, jb, descb, contextb, &
                                        plan) result(code)
        integer, intent(in) :: m, n, ia, ja, contexta, ib, jb, contextb
        character, intent(in) :: type
        integer, intent(in), target :: desca(9), descb(9)
        class(*), intent(inout), target :: a(..), b(..)
        integer, intent(out) :: plan
        code = made("plan_pgemr2d", [integer(w) :: width, there, codes(type), m, n, part(a, ia, ja, desca), contexta, &
                                     part(b, ib, jb, descb), contextb], plan)
    end function

    integer function pmm3d_ptran(context, type, m, n, alpha, a, ia, ja, desca, beta, c, ic, jc, descc) result(code)
        integer, intent(in) :: context, m, n, ia, ja, ic, jc
        character, intent(in) :: type
        integer, intent(in), target :: desca(9), descc(9)
        class(*), intent(in), target :: alpha, beta, a(..)
        class(*), intent(inout), target :: c(..)
        code = called("ptran", [integer(w) :: width, at_once, context, codes(type), m, n, factor(alpha), &
                                part(a, ia, ja, desca), factor(beta), part(c, ic, jc, descc)])
    end function

    integer function pmm3d_plan_ptran(context, type, m, n, alpha, a, ia, ja, desca, beta, c, ic, jc, descc, &
                                      plan) result(code)
        integer, intent(in) :: context, m, n, ia, ja, ic, jc
        character, intent(in) :: type
        integer, intent(in), target :: desca(9), descc(9)
        class(*), intent(in), target :: alpha, beta
        class(*), intent(inout), target :: a(..), c(..)
        integer, intent(out) :: plan
        code = made("plan_ptran", [integer(w) :: width, there, context, codes(type), m, n, factor(alpha), &
                                   part(a, ia, ja, desca), factor(beta), part(c, ic, jc, descc)], plan)
    end function

    integer function pmm3d_ptranu(context, type, m, n, alpha, a, ia, ja, desca, beta, c, ic, jc, descc) result(code)
        integer, intent(in) :: context, m, n, ia, ja, ic, jc
        character, intent(in) :: type
        integer, intent(in), target :: desca(9), descc(9)
        class(*), intent(in), target :: alpha, beta, a(..)
        class(*), intent(inout), target :: c(..)
        code = called("ptranu", [integer(w) :: width, at_once, context, codes(type), m, n, factor(alpha), &
                                 part(a, ia, ja, desca), factor(beta), part(c, ic, jc, descc)])
    end function

    integer function pmm3d_plan_ptranu(context, type, m, n, alpha, a, ia, ja, desca, beta, c, ic, jc, descc, &
                                       plan) result(code)
        integer, intent(in) :: context, m, n, ia, ja, ic, jc
        character, intent(in) :: type
        integer, intent(in), target :: desca(9), descc(9)
        class(*), intent(in), target :: alpha, beta
        class(*), intent(inout), target :: a(..), c(..)
        integer, intent(out) :: plan
        code = made("plan_ptranu", [integer(w) :: width, there, context, codes(type), m, n, factor(alpha), &
                                    part(a, ia, ja, desca), factor(beta), part(c, ic, jc, descc)], plan)
    end function

    integer function pmm3d_ptranc(context, type, m, n, alpha, a, ia, ja, desca, beta, c, ic, jc, descc) result(code)
        integer, intent(in) :: context, m, n, ia, ja, ic, jc
        character, intent(in) :: type
        integer, intent(in), target :: desca(9), descc(9)
        class(*), intent(in), target :: alpha, beta, a(..)
        class(*), intent(inout), target :: c(..)
        code = called("ptranc", [integer(w) :: width, at_once, context, codes(type), m, n, factor(alpha), &
                                 part(a, ia, ja, desca), factor(beta), part(c, ic, jc, descc)])
    end function

    integer function pmm3d_plan_ptranc(context, type, m, n, alpha, a, ia, ja, desca, beta, c, ic, jc, descc, &
                                       plan) result(code)
        integer, intent(in) :: context, m, n, ia, ja, ic, jc
        character, intent(in) :: type
        integer, intent(in), target :: desca(9), descc(9)
        class(*), intent(in), target :: alpha, beta
        class(*), intent(inout), target :: a(..), c(..)
        integer, intent(out) :: plan
        code = made("plan_ptranc", [integer(w) :: width, there, context, codes(type), m, n, factor(alpha), &
                                    part(a, ia, ja, desca), factor(beta), part(c, ic, jc, descc)], plan)
    end function

    integer function pmm3d_pgeadd(context, type, trans, m, n, alpha, a, ia, ja, desca, beta, c, ic, jc, &
                                  descc) result(code)
        integer, intent(in) :: context, m, n, ia, ja, ic, jc
        character, intent(in) :: type, trans
        integer, intent(in), target :: desca(9), descc(9)
        class(*), intent(in), target :: alpha, beta, a(..)
        class(*), intent(inout), target :: c(..)
        code = called("pgeadd", [integer(w) :: width, at_once, context, codes(type//trans), m, n, factor(alpha), &
                                 part(a, ia, ja, desca), factor(beta), part(c, ic, jc, descc)])
    end function

    integer function pmm3d_plan_pgeadd(context, type, trans, m, n, alpha, a, ia, ja, desca, beta, c, ic, jc, descc, &
                                       plan) result(code)
        integer, intent(in) :: context, m, n, ia, ja, ic, jc
        character, intent(in) :: type, trans
        integer, intent(in), target :: desca(9), descc(9)
        class(*), intent(in), target :: alpha, beta
        class(*), intent(inout), target :: a(..), c(..)
        integer, intent(out) :: plan
        code = made("plan_pgeadd", [integer(w) :: width, there, context, codes(type//trans), m, n, factor(alpha), &
                                    part(a, ia, ja, desca), factor(beta), part(c, ic, jc, descc)], plan)
    end function

    integer function pmm3d_psyrk(context, type, uplo, trans, n, k, alpha, a, ia, ja, desca, beta, c, ic, jc, &
                                 descc) result(code)
        integer, intent(in) :: context, n, k, ia, ja, ic, jc
        character, intent(in) :: type, uplo, trans
        integer, intent(in), target :: desca(9), descc(9)
        class(*), intent(in), target :: alpha, beta, a(..)
        class(*), intent(inout), target :: c(..)
        code = called("psyrk", [integer(w) :: width, at_once, context, codes(type//uplo//trans), n, k, factor(alpha), &
                                part(a, ia, ja, desca), factor(beta), part(c, ic, jc, descc)])
    end function

    integer function pmm3d_pherk(context, type, uplo, trans, n, k, alpha, a, ia, ja, desca, beta, c, ic, jc, &
                                 descc) result(code)
        integer, intent(in) :: context, n, k, ia, ja, ic, jc
        character, intent(in) :: type, uplo, trans
        integer, intent(in), target :: desca(9), descc(9)
        class(*), intent(in), target :: alpha, beta, a(..)
        class(*), intent(inout), target :: c(..)
        code = called("pherk", [integer(w) :: width, at_once, context, codes(type//uplo//trans), n, k, factor(alpha), &
                                part(a, ia, ja, desca), factor(beta), part(c, ic, jc, descc)])
    end function

    integer function pmm3d_psyr2k(context, type, uplo, trans, n, k, alpha, a, ia, ja, desca, b, ib, jb, descb, beta, &
                                  c, ic, jc, descc) result(code)
        integer, intent(in) :: context, n, k, ia, ja, ib, jb, ic, jc
        character, intent(in) :: type, uplo, trans
        integer, intent(in), target :: desca(9), descb(9), descc(9)
        class(*), intent(in), target :: alpha, beta, a(..), b(..)
        class(*), intent(inout), target :: c(..)
        code = called("psyr2k", [integer(w) :: width, at_once, context, codes(type//uplo//trans), n, k, factor(alpha), &
                                 part(a, ia, ja, desca), part(b, ib, jb, descb), factor(beta), &
                                 part(c, ic, jc, descc)])
    end function

    integer function pmm3d_pher2k(context, type, uplo, trans, n, k, alpha, a, ia, ja, desca, b, ib, jb, descb, beta, &
                                  c, ic, jc, descc) result(code)
        integer, intent(in) :: context, n, k, ia, ja, ib, jb, ic, jc
        character, intent(in) :: type, uplo, trans
        integer, intent(in), target :: desca(9), descb(9), descc(9)
        class(*), intent(in), target :: alpha, beta, a(..), b(..)
        class(*), intent(inout), target :: c(..)
        code = called("pher2k", [integer(w) :: width, at_once, context, codes(type//uplo//trans), n, k, factor(alpha), &
                                 part(a, ia, ja, desca), part(b, ib, jb, descb), factor(beta), &
                                 part(c, ic, jc, descc)])
    end function

    integer function pmm3d_psymm(context, type, side, uplo, m, n, alpha, a, ia, ja, desca, b, ib, jb, descb, beta, c, &
                                 ic, jc, descc) result(code)
        integer, intent(in) :: context, m, n, ia, ja, ib, jb, ic, jc
        character, intent(in) :: type, side, uplo
        integer, intent(in), target :: desca(9), descb(9), descc(9)
        class(*), intent(in), target :: alpha, beta, a(..), b(..)
        class(*), intent(inout), target :: c(..)
        code = called("psymm", [integer(w) :: width, at_once, context, codes(type//side//uplo), m, n, factor(alpha), &
                                part(a, ia, ja, desca), part(b, ib, jb, descb), factor(beta), part(c, ic, jc, descc)])
    end function

    integer function pmm3d_phemm(context, type, side, uplo, m, n, alpha, a, ia, ja, desca, b, ib, jb, descb, beta, c, &
                                 ic, jc, descc) result(code)
        integer, intent(in) :: context, m, n, ia, ja, ib, jb, ic, jc
        character, intent(in) :: type, side, uplo
        integer, intent(in), target :: desca(9), descb(9), descc(9)
        class(*), intent(in), target :: alpha, beta, a(..), b(..)
        class(*), intent(inout), target :: c(..)
        code = called("phemm", [integer(w) :: width, at_once, context, codes(type//side//uplo), m, n, factor(alpha), &
                                part(a, ia, ja, desca), part(b, ib, jb, descb), factor(beta), part(c, ic, jc, descc)])
    end function

    integer function pmm3d_ptrmm(context, type, side, uplo, transa, diag, m, n, alpha, a, ia, ja, desca, b, ib, jb, &
                                 descb) result(code)
        integer, intent(in) :: context, m, n, ia, ja, ib, jb
        character, intent(in) :: type, side, uplo, transa, diag
        integer, intent(in), target :: desca(9), descb(9)
        class(*), intent(in), target :: alpha, a(..)
        class(*), intent(inout), target :: b(..)
        code = called("ptrmm", [integer(w) :: width, at_once, context, codes(type//side//uplo//transa//diag), m, n, &
                                factor(alpha), part(a, ia, ja, desca), part(b, ib, jb, descb)])
    end function

    integer function pmm3d_ptrsm(context, type, side, uplo, transa, diag, m, n, alpha, a, ia, ja, desca, b, ib, jb, &
                                 descb) result(code)
        integer, intent(in) :: context, m, n, ia, ja, ib, jb
        character, intent(in) :: type, side, uplo, transa, diag
        integer, intent(in), target :: desca(9), descb(9)
        class(*), intent(in), target :: alpha, a(..)
        class(*), intent(inout), target :: b(..)
        code = called("ptrsm", [integer(w) :: width, at_once, context, codes(type//side//uplo//transa//diag), m, n, &
                                factor(alpha), part(a, ia, ja, desca), part(b, ib, jb, descb)])
    end function

    integer function pmm3d_ppotrf(context, type, uplo, n, a, ia, ja, desca, info) result(code)
        integer, intent(in) :: context, n, ia, ja
        character, intent(in) :: type, uplo
        integer, intent(in), target :: desca(9)
        class(*), intent(inout), target :: a(..)
        integer, intent(out) :: info
        code = with_info("ppotrf", [integer(w) :: width, at_once, context, codes(type//uplo), n, &
                                    part(a, ia, ja, desca), there], info)
    end function

    integer function pmm3d_ppotrs(context, type, uplo, n, nrhs, a, ia, ja, desca, b, ib, jb, descb, info) result(code)
        integer, intent(in) :: context, n, nrhs, ia, ja, ib, jb
        character, intent(in) :: type, uplo
        integer, intent(in), target :: desca(9), descb(9)
        class(*), intent(in), target :: a(..)
        class(*), intent(inout), target :: b(..)
        integer, intent(out) :: info
        code = with_info("ppotrs", [integer(w) :: width, at_once, context, codes(type//uplo), n, nrhs, &
                                    part(a, ia, ja, desca), part(b, ib, jb, descb), there], info)
    end function

    integer function pmm3d_pposv(context, type, uplo, n, nrhs, a, ia, ja, desca, b, ib, jb, descb, info) result(code)
        integer, intent(in) :: context, n, nrhs, ia, ja, ib, jb
        character, intent(in) :: type, uplo
        integer, intent(in), target :: desca(9), descb(9)
        class(*), intent(inout), target :: a(..), b(..)
        integer, intent(out) :: info
        code = with_info("pposv", [integer(w) :: width, at_once, context, codes(type//uplo), n, nrhs, &
                                   part(a, ia, ja, desca), part(b, ib, jb, descb), there], info)
    end function

    integer function pmm3d_ptrtri(context, type, uplo, diag, n, a, ia, ja, desca, info) result(code)
        integer, intent(in) :: context, n, ia, ja
        character, intent(in) :: type, uplo, diag
        integer, intent(in), target :: desca(9)
        class(*), intent(inout), target :: a(..)
        integer, intent(out) :: info
        code = with_info("ptrtri", [integer(w) :: width, at_once, context, codes(type//uplo//diag), n, &
                                    part(a, ia, ja, desca), there], info)
    end function

    ! Call a function of pmm3d.embedding. Its results are up to four numbers. Arguments have no intent, because arrays are
    ! written at addresses in them.
    integer function called(name, arguments, results) result(code)
        character(len=*), intent(in) :: name
        integer(w) :: arguments(:)
        integer(w), intent(out), optional :: results(4)
        integer(w) :: found(4)
        found = 0
        code = call_in_c(name//c_null_char, arguments, size(arguments, kind=c_int), found)
        if (present(results)) results = found
    end function

    ! As `called`, of a function that makes an object; 0 after an error.
    integer function made(name, arguments, object) result(code)
        character(len=*), intent(in) :: name
        integer(w) :: arguments(:)
        integer, intent(out) :: object
        integer(w) :: found(4)
        code = called(name, arguments, found)
        object = merge(int(found(1)), 0, code == PMM3D_OK)
    end function

    ! As `called`, of a routine with INFO; -1 after an error.
    integer function with_info(name, arguments, info) result(code)
        character(len=*), intent(in) :: name
        integer(w) :: arguments(:)
        integer, intent(out) :: info
        integer(w) :: found(4)
        code = called(name, arguments, found)
        info = merge(int(found(1)), -1, code == PMM3D_OK)
    end function

    ! A factor of a routine: address and type.
    function factor(number) result(found)
        class(*), intent(in), target :: number
        integer(w) :: found(2)
        found = [integer(w) :: place(number), type_of(number)]
    end function

    ! A matrix of a routine: address, row, column, address of the descriptor, type.
    function part(array, i, j, desc) result(found)
        class(*), intent(in), target :: array(..)
        integer, intent(in) :: i, j
        integer, intent(in), target :: desc(9)
        integer(w) :: found(5)
        found = [integer(w) :: place(array), i, j, place(desc), type_in(array)]
    end function

    ! Characters as integers.
    function codes(text) result(found)
        character(len=*), intent(in) :: text
        integer(w) :: found(len(text))
        integer :: i
        found = [(ichar(text(i:i), w), i=1, len(text))]
    end function

    ! A text without spaces at its end, as in C.
    function c_text(text) result(found)
        character(len=*), intent(in) :: text
        character(kind=c_char) :: found(len(text) + 1)
        integer :: i
        found = c_null_char
        do i = 1, len_trim(text)
            found(i) = text(i:i)
        end do
    end function

    ! `address` as an integer.
    integer(w) function place(array)
        class(*), intent(in), target :: array(..)
        place = transfer(address(array), 0_w)
    end function

    integer(c_signed_char) function as_char(letter)
        character, intent(in) :: letter
        as_char = int(ichar(letter), c_signed_char)
    end function

    ! The type of a number as a letter of the BLAS; '?' for another type.
    integer(c_signed_char) function type_of(number) result(letter)
        class(*), intent(in) :: number
        letter = as_char('?')
        select type (number)
        type is (real(c_float)); letter = as_char('s')
        type is (real(c_double)); letter = as_char('d')
        type is (complex(c_float)); letter = as_char('c')
        type is (complex(c_double)); letter = as_char('z')
        end select
    end function

    ! The type of the elements of an array, as by type_of; 0: it has none; '#': three dimensions; '-': gaps.
    integer(c_signed_char) function type_in(array) result(letter)
        class(*), intent(in), target :: array(..)
        letter = 0
        select rank (array)
        rank (0); letter = type_of(array)
        rank (1); if (size(array) > 0) letter = type_of(array(lbound(array, 1)))
        rank (2); if (size(array) > 0) letter = type_of(array(lbound(array, 1), lbound(array, 2)))
        rank (*); letter = type_of(array(1))
        rank default; letter = as_char('#')
        end select
        if (.not. c_associated(address(array))) letter = as_char('-') ! gfortran 12: is_contiguous of class(*) is wrong
    end function

    ! An integer of 4 or of 8 bytes, in 8; -huge for another type.
    integer(c_int64_t) function wide(number)
        class(*), intent(in) :: number
        wide = -huge(wide)
        select type (number)
        type is (integer(c_int32_t)); wide = number
        type is (integer(c_int64_t)); wide = number
        end select
    end function

    function all_wide(box) result(found)
        class(*), intent(in) :: box(4)
        integer(c_int64_t) :: found(4)
        integer :: i
        found = [(wide(box(i)), i=1, 4)]
    end function

    ! The address of an array or of an element; null for a section with gaps. The strides of one column do not count.
    type(c_ptr) function address(array)
        class(*), intent(in), target :: array(..)
        address = start(array)
        select rank (array)
        rank (2); if (size(array, 2) == 1) address = start(array(:, lbound(array, 2)))
        end select
    end function

    type(c_ptr) function start(array)
        type(*), intent(in), target :: array(..)
        start = c_null_ptr
        if (is_contiguous(array)) start = c_loc(array)
    end function
end module
